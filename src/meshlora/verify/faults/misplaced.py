"""Faults in what lies where: shards, pieces of fused matrices, key/value heads, vocabulary.

Owns: the wrong code, as `verify.faults.wrong_code` does for everything else. Does not own: which faults there are and
what they break (`verify.faults.registry`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshlora.comm.groups import Axis
from meshlora.layers.embedding import ParallelEmbedding
from meshlora.layers.head import loss as vocabulary
from meshlora.layers.linear import ParallelLinear
from meshlora.model.weights import Placement
from meshlora.plan.layout import Layout, Piece

# --- the base as it is read


def _seen_as(mesh: Any, rank: int) -> Any:
    """A mesh on which we are tp rank `rank`."""
    return SimpleNamespace(tp=dataclasses.replace(mesh.tp, rank=rank))


def read_as(rank: Callable[[Axis], int], *, where: Callable[[str, Placement], bool]) -> Callable[[Any], Any]:
    """Reading the base as another tp rank, where `where(name, placement)`."""

    def replace(original: Any) -> Any:
        def read(name: str, placement: Placement, source: Any, mesh: Any) -> Tensor:
            wrong = placement.layout is not None and not placement.num_experts and where(name, placement)
            return original(name, placement, source, _seen_as(mesh, rank(mesh.tp)) if wrong else mesh)

        return read

    return replace


def reversed_rank(tp: Axis) -> int:
    return tp.size - 1 - tp.rank


def next_rank(tp: Axis) -> int:
    return (tp.rank + 1) % tp.size


def rank_0(tp: Axis) -> int:
    return 0


def is_row_weight(name: str, placement: Placement) -> bool:
    return placement.dim == 1 and name.endswith(".weight")


def is_column_bias(name: str, placement: Placement) -> bool:
    return name.endswith(".bias")


def is_wide_norm(name: str, placement: Placement) -> bool:
    return not name.endswith(".bias") and len(placement.shape) == 1


def pieces_reversed(names: str) -> Callable[[Any], Any]:
    """The rows of a fused matrix are held piece by piece, but in the reversed order of pieces. names: of its pieces."""

    def replace(original: Any) -> Any:
        def read(name: str, placement: Placement, source: Any, mesh: Any) -> Tensor:
            value: Tensor = original(name, placement, source, mesh)
            if placement.layout is None or placement.num_experts or not _is_fused(placement.layout, names):
                return value
            sizes = [run.size for run in placement.layout.runs(rank=mesh.tp.rank, size=mesh.tp.size)]
            return torch.cat(value.split(sizes, placement.dim)[::-1], placement.dim or 0)

        return read

    return replace


def _is_fused(layout: Layout, names: str) -> bool:
    return sorted(piece.name for piece in layout.pieces) == sorted(names.split())


def _as_one_matrix(layout: Layout | None) -> Layout | None:
    return Layout.plain(layout.size) if layout is not None and len(layout.pieces) > 1 else layout


def read_as_one_matrix(original: Any) -> Any:
    """A fused matrix is cut as if it had no pieces."""

    def read(name: str, placement: Placement, source: Any, mesh: Any) -> Any:
        if not placement.num_experts:
            placement = dataclasses.replace(placement, layout=_as_one_matrix(placement.layout))
        return original(name, placement, source, mesh)

    return read


def factor_as_one_matrix(original: Any) -> Any:
    def local_part(full: Tensor, rule: Any, mesh: Any) -> Any:
        cuts = tuple(dataclasses.replace(cut, layout=_as_one_matrix(cut.layout)) for cut in rule.cuts)
        return original(full, rule if rule.is_expert else dataclasses.replace(rule, cuts=cuts), mesh)

    return local_part


def units_dealt_round(original: Any) -> Any:
    """Of replicated heads rank i has the i-th, counted round and round, and not that of its query heads."""

    def share(self: Piece, *, rank: int, size: int) -> range:
        return (
            original(self, rank=rank % self.num_units * (size // self.num_units), size=size)
            if (self.copies(size) > 1)
            else original(self, rank=rank, size=size)
        )

    return share


def arguments_of_rank_0(original: Any) -> Any:
    return lambda module, of, tp: original(module, of, dataclasses.replace(tp, rank=0))


# --- adapters on pieces


def one_piece_further(original: Any) -> Any:
    """The rows of B land where the next piece is."""

    def piece_rows(self: ParallelLinear, piece: str) -> Tensor:
        rows: Tensor = original(self, piece)
        return (rows + len(rows)) % self.out_features

    return piece_rows


def rows_one_piece_further(original: Any) -> Any:
    """The same in a file."""

    def rows_of(target: Any) -> dict[str, Tensor]:
        return {piece: (rows + len(rows)) % target.out_features for piece, rows in original(target).items()}

    return rows_of


# --- vocabulary


def rows_of_next_rank(original: Any) -> Any:
    """Each rank takes the tokens of another for its own."""

    def local(self: ParallelEmbedding, ids: Tensor) -> Any:
        with mock.patch.object(self, "first_id", next_rank(self.tp) * self.num_embeddings):
            return original(self, ids)

    return local


def nothing_masked(found: tuple[Tensor, Tensor | None], *_: Any) -> tuple[Tensor, Tensor | None]:
    ids, is_other = found
    return ids, None if is_other is None else torch.zeros_like(is_other)


def labels_of_next_rank(original: Any) -> Any:
    def loss(self: Any, logits: Tensor, labels: Tensor, gradient: Tensor) -> Tensor:
        other = dataclasses.replace(self.axis, rank=next_rank(self.axis))
        return original(dataclasses.replace(self, axis=other), logits, labels, gradient)

    return loss


def padding_in_softmax(original: Any) -> Any:
    def loss(self: Any, logits: Tensor, labels: Tensor, gradient: Tensor) -> Tensor:
        padded = dataclasses.replace(self, vocab=self.axis.size * logits.shape[1])
        return original(padded, logits, labels, gradient)

    return loss


def smoothed_over_local_vocabulary(original: Any) -> Any:
    """Each rank takes the mean over its own logits for that over all."""

    def own_total(tensor: Tensor, axis: Axis) -> Tensor:
        by_rank: Tensor = gather(tensor, axis)
        by_rank.view(axis.size, *tensor.shape)[:, 3] = tensor[3]
        return by_rank

    gather = vocabulary.all_gather

    def loss(self: Any, logits: Tensor, labels: Tensor, gradient: Tensor) -> Tensor:
        with mock.patch.object(vocabulary, "all_gather", own_total):
            return original(self, logits, labels, gradient)

    return loss
