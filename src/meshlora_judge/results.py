"""Results: the distance of the ranks' parts of one tensor from the reference's, collected by phase.

Owns: the measure, with nothing averaged: the worst copy counts. Does not own: limits, or the choice of tensors
(`meshlora_judge.judge`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshlora_judge.unshard import Piece, assembled, is_complete


@dataclass(frozen=True)
class TensorResult:
    """One tensor of one phase.

    Attributes:
        error: relative; infinite if the tensor cannot be compared. limit: the largest error that passes.
        whole: the reference's tensor. pieces: the ranks' parts, for a diagnosis. note: why it cannot be compared.
    """

    name: str
    error: float
    limit: float
    whole: Tensor | None = None
    pieces: list[Piece] = field(default_factory=list)
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class Phase:
    """All tensors of one phase."""

    name: str
    results: list[TensorResult]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    @property
    def worst(self) -> TensorResult | None:
        """The tensor furthest beyond its limit, or nearest to it if all pass."""
        return max(self.results, key=lambda r: (not r.passed, r.error / max(r.limit, 1e-300)), default=None)


def as_wanted(name: str, note: str) -> TensorResult:
    """The result of a yes-or-no check: failed if there is a note."""
    return TensorResult(name, math.inf if note else 0.0, 0.0, note=note)


def checked(name: str, is_right: bool, note: str) -> TensorResult:
    """The result of a yes-or-no check: `note` says what is wrong if it is not right."""
    return as_wanted(name, "" if is_right else note)


def summed_where_unequal(pieces: list[Piece], whole: Tensor) -> list[Piece]:
    """`pieces` as copies of a whole, or their sum as terms of one: whichever is nearer. They are far apart.

    Inside a region a gradient is one term per rank, unless the following operation has already left the region. Before
    the first layer it is one term per cp rank, and the same on all tp ranks: each of these has a sum of its own.
    """
    by_tp: dict[tuple[int, ...], list[Piece]] = {}
    for piece in pieces:
        by_tp.setdefault(piece.copy[1:], []).append(piece)
    each = [Piece(0, copy, assembled(own, whole, adds=True)) for copy, own in by_tp.items()]
    total = [Piece(0, (), assembled(pieces, whole, adds=True))]
    return min((pieces, each, total), key=lambda found: relative(found, whole))


def relative(pieces: list[Piece], whole: Tensor, *, largest: bool = False) -> float:
    """The worst copy's relative distance from `whole`: L2, or with `largest` the largest element's."""
    copies: dict[tuple[int, ...], list[Piece]] = {}
    for piece in pieces:
        # The worst copy counts: a mean over copies would hide one wrong rank.
        copies.setdefault(piece.copy, []).append(piece)
    errors = [_error_of(own, whole, largest=largest) for own in copies.values()]
    return max(errors, default=math.inf)


def _error_of(copy: list[Piece], whole: Tensor, *, largest: bool) -> float:
    """The relative distance of one copy; infinite if it lacks elements, is not finite, or is all zeros by itself."""
    largest_gaps, squares, is_zero = list[float](), 0.0, True
    if not is_complete(copy, whole):
        return math.inf
    for piece in copy:
        if not bool(torch.isfinite(piece.values).all()):
            return math.inf
        is_zero = is_zero and not bool(piece.values.any())
        gap = piece.values.double() - piece.of(whole).double()
        squares += float(gap.square().sum())
        if gap.numel():
            largest_gaps.append(float(gap.abs().max()))
    # All zeros has a distance of 1, and that of a dead tensor is not to pass a wide limit.
    if is_zero and bool(whole.any()):
        return math.inf
    if largest:
        return max(largest_gaps, default=0.0) / max(float(whole.double().abs().max()), 1e-300)
    return math.sqrt(squares) / max(float(whole.double().norm()), 1e-300)


def only(factors: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: factors[name] for name in names if name in factors}


def missing(ours: Iterable[str], reference: Iterable[str]) -> list[TensorResult]:
    """A failed result for each name that only one side has."""
    ours, reference = set(ours), set(reference)
    notes = dict.fromkeys(reference - ours, "not in ours") | dict.fromkeys(ours - reference, "not in the reference")
    return [as_wanted(name, note) for name, note in sorted(notes.items())]


def minus(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() - b[name].double() for name, value in a.items() if name in b}
