"""Where each rank's part belongs in the whole: the judge's own view of sharding, from shapes and tokens alone.

Owns: the canonical order of tokens, and the pieces that a whole tensor is made of. Nothing here knows the plan: a dim
that is 1/tp of the reference's is split, a rank that holds 1/tp of the tokens has the next slice of them, and a
sequence is known by its tokens, not by who was meant to take it.

Canonical: all real tokens of all sequences of a step, one after another, `[T, ...]`; padding is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshlora.oracle.capture import MicroBatchCapture
from meshlora.oracle.trace import Trace
from meshlora.plan.topology import Topology


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a tensor.

    Attributes:
        rank: who. copy: pieces of the same copy together must be the whole tensor, each element once.
        values: what it holds. rows: the rows of the whole that these are; None: all.
        dim: the dim that is split, start: where the piece begins on it; None: not split.
    """

    rank: int
    copy: tuple[int, ...]
    values: Tensor
    rows: Tensor | None = None
    dim: int | None = None
    start: int = 0

    def of(self, whole: Tensor) -> Tensor:
        """The part of `whole` that this piece should equal."""
        part = whole if self.rows is None else whole[self.rows]
        return part if self.dim is None else part.narrow(self.dim, self.start, self.values.shape[self.dim])


class ShapeError(ValueError):
    """A rank's tensor cannot be a part of the reference's."""


@dataclass(frozen=True)
class Layout:
    """How tokens lie in an output: `[B, S, ...]` or flat `[B*S, ...]`; swapped `[B, x, S, ...]`; once `[1, S, ...]`."""

    num_token_dims: int
    is_swapped: bool = False
    is_once: bool = False


def layout_of(shape: torch.Size, micro: MicroBatchCapture) -> Layout | None:
    """The layout of an output of the reference on `micro`; None where its dims are not those of tokens."""
    b, s = micro.input_ids.shape
    if shape[:2] == (b, s):
        return Layout(2)
    if shape[:1] == (b * s,):
        return Layout(1)
    if len(shape) > 2 and shape[:2] == (1, s):
        return Layout(2, is_once=True)
    if len(shape) > 3 and (shape[0], shape[2]) == (b, s):
        return Layout(2, is_swapped=True)
    return None


class Tokens:
    """The canonical order of a step's tokens, from the reference's micro-batches.

    Attributes:
        sequences: the token ids of each; no two are alike. index: the way back.
        offsets: where each sequence begins.
    """

    def __init__(self, reference: Trace) -> None:
        self.sequences: list[tuple[int, ...]] = [s for m in reference.micro_batches for s in sequences_of(m)]
        self.offsets = [0]
        for sequence in self.sequences:
            self.offsets.append(self.offsets[-1] + len(sequence))
        self.index = {sequence: index for index, sequence in enumerate(self.sequences)}
        assert len(self.index) == len(self.sequences), "the sequences of a case differ from each other"

    def rows(self, micros: Iterable[MicroBatchCapture]) -> list[Tensor]:
        """For each micro-batch the canonical row of each of its B·S tokens, -1 where it is none: int64 `[B*S]`."""
        result = []
        for micro in micros:
            rows = torch.full(micro.input_ids.shape, -1, dtype=torch.int64)
            for row, sequence in enumerate(sequences_of(micro)):
                if sequence in self.index:
                    rows[row, : len(sequence)] = torch.arange(len(sequence)) + self.offsets[self.index[sequence]]
            result.append(rows.flatten())
        return result


def sequences_of(micro: MicroBatchCapture) -> list[tuple[int, ...]]:
    """The token ids of each row, without padding."""
    return [tuple(ids[mask.bool()].tolist()) for ids, mask in zip(micro.input_ids, micro.attention_mask, strict=True)]


def canonical(reference: Trace, tokens: Tokens, phase: str, name: str) -> tuple[Tensor, Layout] | None:
    """The reference's output `name` as `[T, ...]` and how its tokens lay; None where it has no token dims."""
    layouts, parts, rows = set(), [], tokens.rows(reference.micro_batches)
    for micro, row in zip(reference.micro_batches, rows, strict=True):
        value = getattr(micro, phase).get(name)
        layout = None if value is None else layout_of(value.shape, micro)
        if value is None or layout is None:
            return None
        layouts.add(layout)
        parts.append(flat_tokens(value, layout, micro)[row >= 0])
    if any(layout.is_once for layout in layouts):  # with one sequence in a micro-batch [B, S] looks like [1, S]
        layouts = {Layout(2, is_once=True)}
    if len(layouts) > 1:
        return None
    whole = torch.cat(parts)
    order = torch.argsort(torch.cat([row[row >= 0] for row in rows]))
    return whole[order], layouts.pop()


def flat_tokens(value: Tensor, layout: Layout, micro: MicroBatchCapture) -> Tensor:
    """`[B*S, ...]` or this rank's slice of the tokens, `[B*S/tp, ...]`."""
    if layout.is_swapped:
        value = value.movedim(2, 1)
    if layout.is_once and value.shape[0] == 1:
        value = value.expand(micro.input_ids.shape[0], *value.shape[1:])
    return value.flatten(0, 1) if layout.num_token_dims == 2 else value


def token_pieces(
    ranks: list[Trace],
    rows: list[list[Tensor]],
    topology: Topology,
    phase: str,
    name: str,
    whole: Tensor,
    layout: Layout,
) -> list[Piece]:
    """What the ranks hold of the module output `name`; `rows[rank]` is `Tokens.rows` of the rank's micro-batches.

    Raises:
        ShapeError: a rank has no such output, or one of a shape that cannot be a part.
    """
    pieces = []
    for rank, trace in enumerate(ranks):
        place = topology.coordinates(rank)
        for micro, row in zip(trace.micro_batches, rows[rank], strict=True):
            value = getattr(micro, phase).get(name)
            if value is None:
                raise ShapeError(f"rank {rank} has no {phase} of {name or 'the model'}")
            flat = flat_tokens(value, layout, micro)
            own, is_cut = row, False
            if flat.shape[0] != row.numel():
                is_cut = flat.shape[0] * topology.tp == row.numel()
                if not is_cut:
                    raise ShapeError(f"rank {rank}: {name} is {list(value.shape)} for {row.numel()} tokens")
                own = row.tensor_split(topology.tp)[place["tp"]]
            dim, start = _split_dim(flat.shape, whole.shape, place["tp"], topology.tp, f"rank {rank}: {name}", first=1)
            copy = () if is_cut or dim is not None else (place["tp"],)
            pieces.append(Piece(rank, copy, flat[own >= 0], own[own >= 0], dim, start))
    return pieces


def factor_pieces(ranks: list[dict[str, Tensor]], topology: Topology, name: str, whole: Tensor) -> list[Piece]:
    """What the ranks hold of the factor `name` (or of its gradient): every dp rank has a copy of its own.

    Raises:
        ShapeError: as above.
    """
    pieces = []
    for rank, factors in enumerate(ranks):
        place = topology.coordinates(rank)
        if name not in factors:
            raise ShapeError(f"rank {rank} has no {name}")
        dim, start = _split_dim(factors[name].shape, whole.shape, place["tp"], topology.tp, f"rank {rank}: {name}")
        copy = (place["dp"],) if dim is not None else (place["dp"], place["tp"])
        pieces.append(Piece(rank, copy, factors[name], None, dim, start))
    return pieces


def _split_dim(
    local: torch.Size, whole: torch.Size, tp_rank: int, tp: int, what: str, *, first: int = 0
) -> tuple[int | None, int]:
    """(the one dim on which `local` is 1/tp of `whole`, where it starts), or (None, 0) where they are alike."""
    differing = [d for d in range(first, len(whole)) if len(local) == len(whole) and local[d] != whole[d]]
    if len(local) != len(whole) or len(differing) > 1:
        raise ShapeError(f"{what} is {list(local)}, the whole is {list(whole)}")
    if not differing:
        return None, 0
    dim = differing[0]
    if local[dim] * tp != whole[dim]:
        raise ShapeError(f"{what} is {list(local)}, the whole is {list(whole)}: not 1/{tp}")
    return dim, tp_rank * local[dim]


def is_complete(pieces: list[Piece], whole: Tensor) -> bool:
    """Whether the pieces of a copy have every element of `whole` exactly once."""
    seen = torch.zeros(whole.shape[0], dtype=torch.int64)
    width = math.prod(whole.shape[1:])
    for piece in pieces:
        rows = torch.arange(whole.shape[0]) if piece.rows is None else piece.rows
        if piece.dim == 0:
            rows = rows[piece.start : piece.start + piece.values.shape[0]]
        seen.index_add_(0, rows, torch.full_like(rows, math.prod(piece.values.shape[1:])))
    return bool((seen == width).all())
