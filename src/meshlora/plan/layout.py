"""Layouts: which rows of a possibly fused matrix a rank holds, and in which order.

Owns: the index map, in both directions, of every way to split a dim: rows or columns of a weight, a bias, or the
matching side of a LoRA factor. Plain arithmetic.
Does not own: which family has which layout (`wings.tables`, `plan.rules`).

A fused matrix is a list of *pieces* (the q, k and v of a qkv) consisting of indivisible *units*: the rows of a head, or
single rows. Pieces are interleaved in `groups` groups, each with an equal share of every piece:

- blocks `[Q|K|V]`, `[gate|up]`: 1 group
- per head `[q k v] * heads`: as many groups as heads
- per group of key/value heads `[q...q k v] * groups`: as many groups as key/value heads

A rank holds an equal share of the units of every piece, in the same layout. A piece with fewer units than ranks (the
key/value heads of grouped-query attention) is *replicated*: several neighbouring ranks hold each unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import torch
from torch import Tensor


class Split(StrEnum):
    """How a linear `y = x W^T`, W `[out, in]`, is split over tp."""

    COLUMN = "column"  # W split on out: each rank computes its own output features
    ROW = "row"  # W split on in: each rank consumes its own input features, outputs are summed
    WHOLE = "whole"  # the same W on every rank


@dataclass(frozen=True)
class Piece:
    """One logical matrix of a fused matrix: `num_units` units of `unit` rows each.

    can_replicate: whether several ranks may hold one unit, as with key/value heads that serve many query heads.
    """

    name: str
    num_units: int
    unit: int
    can_replicate: bool = False

    @property
    def size(self) -> int:
        """Rows."""
        return self.num_units * self.unit

    def copies(self, size: int) -> int:
        """The number of ranks, of `size`, that hold each unit."""
        return max(1, size // self.num_units)

    def can_split(self, size: int) -> bool:
        """Whether `size` ranks can hold equally many units, or each unit can be held by equally many ranks."""
        return self.num_units % size == 0 or (self.can_replicate and size % self.num_units == 0)

    def share(self, *, rank: int, size: int) -> range:
        """The units of rank `rank`."""
        # With fewer units than ranks, neighbours start at the same one.
        number = max(1, self.num_units // size)
        start = rank * self.num_units // size
        return range(start, start + number)


@dataclass(frozen=True)
class Run:
    """Consecutive rows `start:stop` of the whole, held by a rank. copies: the number of ranks that hold them."""

    piece: str
    start: int
    stop: int
    copies: int

    @property
    def size(self) -> int:
        """Rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """The pieces of one dim, which determine the part held by each of `size` ranks.

    Attributes:
        pieces: in their order within a group.
        groups: of the whole. local_groups: of a rank's part; 0: its share of `groups`.
        is_padded: for a vocabulary: every rank holds ceil(rows / size) rows, the last ranks padded with zeros.
    """

    pieces: tuple[Piece, ...]
    groups: int = 1
    local_groups: int = 0
    is_padded: bool = False

    def __post_init__(self) -> None:
        assert all(piece.num_units % self.groups == 0 for piece in self.pieces), self
        assert not self.is_padded or (len(self.pieces) == 1 and self.pieces[0].unit == 1), self

    @classmethod
    def plain(cls, num_units: int, unit: int = 1, *, can_replicate: bool = False) -> Self:
        """One matrix with consecutive units."""
        return cls((Piece("", num_units, unit, can_replicate),))

    @classmethod
    def padded(cls, size: int) -> Self:
        """The rows of a vocabulary."""
        return cls((Piece("", size, 1),), is_padded=True)

    @property
    def size(self) -> int:
        """Rows of the whole."""
        return sum(piece.size for piece in self.pieces)

    def can_split(self, size: int) -> bool:
        """Whether `size` ranks can hold equal parts in the layout of the whole."""
        if self.is_padded:
            return True
        groups = self._groups_on(size)
        return all(
            piece.can_split(size) and len(piece.share(rank=0, size=size)) % groups == 0 for piece in self.pieces
        ) and (self.groups % size == 0 or size % self.groups == 0 or self.local_groups > 0)

    def local_size(self, size: int) -> int:
        """Rows that each rank holds, padding included."""
        if self.is_padded:
            return -(-self.size // size)
        return sum(len(piece.share(rank=0, size=size)) * piece.unit for piece in self.pieces)

    def copies(self, size: int) -> set[int]:
        """How many ranks hold each row, over all rows; {1} without replication."""
        if self.is_padded:
            return {1}
        return {piece.copies(size) for piece in self.pieces}

    def runs(self, *, rank: int, size: int) -> tuple[Run, ...]:
        """The rows held by rank `rank` of `size`, in its local order; adjacent runs are merged."""
        if self.is_padded:
            local = self.local_size(size)
            # The last ranks may have less than others, or nothing.
            start, stop = min(rank * local, self.size), min((rank + 1) * local, self.size)
            return (Run(self.pieces[0].name, start, stop, 1),)
        assert self.can_split(size), (self, size)
        groups = self._groups_on(size)
        runs: list[Run] = []
        for group in range(groups):
            for piece in self.pieces:
                share = piece.share(rank=rank, size=size)
                # Every group of the part has an equal share of every piece, as every group of the whole has.
                each = len(share) // groups
                self._append(runs, piece, share[group * each : (group + 1) * each], piece.copies(size))
        return tuple(runs)

    def rows(self, *, rank: int, size: int) -> Tensor:
        """The held rows as indices into the whole, int64 `[local_size]`, without padding."""
        return torch.cat([torch.arange(run.start, run.stop) for run in self.runs(rank=rank, size=size)])

    def piece_rows(self, name: str, *, rank: int = 0, size: int = 1) -> Tensor:
        """Indices of the rows of piece `name` within the rank's part."""
        found, offset = [], 0
        for run in self.runs(rank=rank, size=size):
            if run.piece == name:
                found.append(torch.arange(offset, offset + run.size))
            offset += run.size
        return torch.cat(found)

    def cut(self, whole: Tensor, dim: int, *, rank: int, size: int) -> Tensor:
        """A copy of the part of `whole` held by a rank, zero-padded."""
        runs = self.runs(rank=rank, size=size)
        parts = [whole.narrow(dim, run.start, run.size) for run in runs]
        missing = self.local_size(size) - sum(run.size for run in runs)
        if missing:  # of a vocabulary: every rank has as many rows, as collectives need
            shape = list(whole.shape)
            shape[dim] = missing
            parts.append(whole.new_zeros(shape))
        return torch.cat(parts, dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole from the parts of all ranks, in rank order. For replicated rows the first rank's values count."""
        shape = list(parts[0].shape)
        shape[dim] = self.size
        whole = parts[0].new_empty(shape)
        # Backwards, so that of those that hold the same rows the first one writes last.
        for rank in reversed(range(len(parts))):
            offset = 0
            for run in self.runs(rank=rank, size=len(parts)):
                whole.narrow(dim, run.start, run.size).copy_(parts[rank].narrow(dim, offset, run.size))
                offset += run.size
        return whole

    def _groups_on(self, size: int) -> int:
        """The number of groups in the part of each of `size` ranks."""
        if size == 1:
            return self.groups
        return self.local_groups or max(1, self.groups // size)

    def _append(self, runs: list[Run], piece: Piece, units: range, copies: int) -> None:
        """Append the rows of `units` of `piece`, merged with the last run if contiguous."""
        each = piece.num_units // self.groups
        before = 0  # rows of a group that come before those of the piece
        for other in self.pieces:
            if other is piece:
                break
            before += other.size // self.groups
        unit = units.start
        while unit < units.stop:
            stop = min(units.stop, (unit // each + 1) * each)  # the end of the units that are contiguous in the whole
            start = unit // each * (self.size // self.groups) + before + unit % each * piece.unit
            run = Run(piece.name, start, start + (stop - unit) * piece.unit, copies)
            if runs and (runs[-1].piece, runs[-1].stop, runs[-1].copies) == (run.piece, run.start, run.copies):
                run = Run(run.piece, runs.pop().start, run.stop, run.copies)
            runs.append(run)
            unit = stop


def contiguous(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges, those that follow one another as one."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            start, _ = found.pop()
        found.append((start, stop))
    return found
