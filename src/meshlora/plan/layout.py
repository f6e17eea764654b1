"""Layouts: which rows of a matrix, or of the matrices fused in it, a rank holds, and in which order.

Owns: one index map for every way in which a dim is split, both ways. Plain arithmetic; the dim may be the rows of a
weight, the columns, a bias, or the side of a LoRA factor that goes with them.
Does not own: which family has which layout (`plan.families.explicit`, `plan.rules`).

A fused matrix is a list of *pieces* (the q, k and v of a qkv), each made of *units* that are never cut: the rows of one
head, or single rows. They are interleaved in `groups` groups, each with an equal share of every piece:

- blocks `[Q|K|V]`, `[gate|up]`: 1 group
- per head `[q k v] * heads`: as many groups as heads
- per group of key/value heads `[q...q k v] * groups`: as many groups as key/value heads

A rank holds an equal share of the units of every piece, laid out the same way. A piece with fewer units than ranks (the
key/value heads of grouped-query attention) is *replicated*: each unit lies on several neighbouring ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import torch
from torch import Tensor


class Split(StrEnum):
    """How a linear `y = x W^T`, W `[out, in]`, lies on the tp axis."""

    COLUMN = "column"  # W split on out: each rank makes its own output features
    ROW = "row"  # W split on in: each rank consumes its own input features, outputs are summed
    WHOLE = "whole"  # the same W on every rank


@dataclass(frozen=True)
class Piece:
    """One logical matrix of a fused one: `num_units` units of `unit` rows each.

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
        """On how many of `size` ranks each unit lies."""
        return max(1, size // self.num_units)

    def can_split(self, size: int) -> bool:
        """Whether `size` ranks can share the units equally, or each unit be held by equally many ranks."""
        return self.num_units % size == 0 or (self.can_replicate and size % self.num_units == 0)

    def share(self, *, rank: int, size: int) -> range:
        """The units of rank `rank`."""
        number = max(1, self.num_units // size)
        start = rank * self.num_units // size
        return range(start, start + number)


@dataclass(frozen=True)
class Run:
    """Consecutive rows `start:stop` of the whole that a rank holds. copies: on how many ranks they lie."""

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
    """How one dim is made of pieces, and hence what each of `size` ranks holds of it.

    Attributes:
        pieces: in the order in which they lie in a group.
        groups: of the whole. local_groups: of a rank's part, 0: its share of the whole's.
        is_padded: a vocabulary: every rank holds ceil(rows / size), the last ones less and zeros after it.
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
        """One matrix whose units lie one after another."""
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
        """Whether `size` ranks can hold equal parts that are laid out as the whole is."""
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
        """The numbers of ranks on which rows lie; {1} where nothing is replicated."""
        return {1} if self.is_padded else {piece.copies(size) for piece in self.pieces}

    def runs(self, *, rank: int, size: int) -> tuple[Run, ...]:
        """What rank `rank` of `size` holds, in the order in which it holds it; neighbours are joined."""
        if self.is_padded:
            local = self.local_size(size)
            start, stop = (min(n * local, self.size) for n in (rank, rank + 1))
            return (Run(self.pieces[0].name, start, stop, 1),)
        assert self.can_split(size), (self, size)
        groups = self._groups_on(size)
        runs: list[Run] = []
        for group in range(groups):
            for piece in self.pieces:
                share = piece.share(rank=rank, size=size)
                each = len(share) // groups
                self._append(runs, piece, share[group * each : (group + 1) * each], piece.copies(size))
        return tuple(runs)

    def rows(self, *, rank: int, size: int) -> Tensor:
        """The same as indices into the whole, int64 `[local_size]`, without padding."""
        return torch.cat([torch.arange(run.start, run.stop) for run in self.runs(rank=rank, size=size)])

    def piece_rows(self, name: str, *, rank: int = 0, size: int = 1) -> Tensor:
        """Where the rows of piece `name` lie in what the rank holds: indices into its part."""
        found, offset = [], 0
        for run in self.runs(rank=rank, size=size):
            if run.piece == name:
                found.append(torch.arange(offset, offset + run.size))
            offset += run.size
        return torch.cat(found)

    def cut(self, whole: Tensor, dim: int, *, rank: int, size: int) -> Tensor:
        """The part of `whole` that a rank holds, in memory of its own; zeros for padding."""
        parts = [whole.narrow(dim, run.start, run.size) for run in self.runs(rank=rank, size=size)]
        missing = self.local_size(size) - sum(part.shape[dim] for part in parts)
        if missing:
            shape = list(whole.shape)
            shape[dim] = missing
            parts.append(whole.new_zeros(shape))
        return torch.cat(parts, dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole from the parts of all ranks, in rank order. Of rows that several hold, the first rank's count."""
        shape = list(parts[0].shape)
        shape[dim] = self.size
        whole = parts[0].new_empty(shape)
        for rank in reversed(range(len(parts))):
            offset = 0
            for run in self.runs(rank=rank, size=len(parts)):
                whole.narrow(dim, run.start, run.size).copy_(parts[rank].narrow(dim, offset, run.size))
                offset += run.size
        return whole

    def _groups_on(self, size: int) -> int:
        """Groups of what each of `size` ranks holds."""
        return self.groups if size == 1 else self.local_groups or max(1, self.groups // size)

    def _append(self, runs: list[Run], piece: Piece, units: range, copies: int) -> None:
        """Add the rows of `units` of `piece`, joined with the last run where they go on from there."""
        each = piece.num_units // self.groups
        before = 0
        for other in self.pieces:
            if other is piece:
                break
            before += other.size // self.groups
        unit = units.start
        while unit < units.stop:
            stop = min(units.stop, (unit // each + 1) * each)  # of the units that lie together in the whole
            start = unit // each * (self.size // self.groups) + before + unit % each * piece.unit
            run = Run(piece.name, start, start + (stop - unit) * piece.unit, copies)
            last = runs[-1] if runs else None
            if last and (last.piece, last.stop, last.copies) == (run.piece, run.start, run.copies):
                runs[-1] = Run(last.piece, last.start, run.stop, last.copies)
            else:
                runs.append(run)
            unit = stop
