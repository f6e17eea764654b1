"""What lies where: shards of matrices and biases, pieces of fused matrices, heads of keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter import attach
from meshlora.comm.groups import Axis
from meshlora.layers.linear import ParallelLinear
from meshlora.model import regions, weights
from meshlora.model.weights import Placement
from meshlora.plan.layout import Layout, Piece
from meshlora.verify.faults.fault import by_name, mutation


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


def one_piece_further(original: Any) -> Any:
    """The rows of B land where the next piece is."""

    def piece_rows(self: ParallelLinear, piece: str) -> Tensor:
        rows: Tensor = original(self, piece)
        return (rows + len(rows)) % self.out_features

    return piece_rows


OF_SHARDS = by_name(
    mutation(
        "base_shards_reversed",
        "tp rank i holds the i-th slice of a row-parallel weight",
        "tp",
        (weights, "_read_local", read_as(reversed_rank, where=is_row_weight)),
    ),
    mutation(
        "column_bias_of_rank_0",
        "tp rank i holds the i-th slice of the bias of a column-parallel linear",
        "tp column_bias",
        (weights, "_read_local", read_as(rank_0, where=is_column_bias)),
    ),
    mutation(
        "qkv_pieces_reversed",
        "a rank holds the rows of a fused matrix in the order q, k, v",
        "tp fused_qkv",
        (weights, "_read_local", pieces_reversed("q k v")),
    ),
    mutation(
        "gate_and_up_swapped",
        "a rank holds its rows of gate before those of up",
        "tp fused_gate_up",
        (weights, "_read_local", pieces_reversed("gate up")),
    ),
    mutation(
        "fused_base_cut_as_one_matrix",
        "of a fused matrix each rank holds a share of every piece",
        "tp fused_blocks",
        (weights, "_read_local", read_as_one_matrix),
        (attach, "local_part", factor_as_one_matrix),
    ),
    mutation(
        "fused_b_cut_as_one_matrix",
        "the rows of B go with the rows of the base",
        "tp fused_blocks fused_target",
        (attach, "local_part", factor_as_one_matrix),
    ),
    mutation(
        "piece_lands_on_the_next",
        "an adapter on a piece adds to the rows of that piece",
        "pieces",
        (ParallelLinear, "_piece_rows", one_piece_further),
    ),
    mutation(
        "kv_head_of_another_rank",
        "a rank holds the key/value heads that its query heads go with",
        "kv_replicas",
        (Piece, "share", units_dealt_round),
    ),
    mutation(
        "heads_of_rank_0_in_arguments",
        "of an argument with a dim of heads each rank sees its own",
        "sliced",
        (regions, "_cut_arguments", arguments_of_rank_0),
    ),
    mutation(
        "wide_norm_weight_of_rank_0",
        "tp rank i holds the i-th slice of the weight of a norm over a split width",
        "tp wide_norm",
        (weights, "_read_local", read_as(rank_0, where=is_wide_norm)),
    ),
)
