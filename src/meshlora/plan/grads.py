"""Gradient axes: over which mesh axes the gradient of a trained parameter is a partial sum.

Owns: the one place where they are derived from how the base is split. Does not own: the summing (`train.gradsync`).

y = x W^T + s (x A^T) B^T with A `[r, in]` on the input side and B `[out, r]` on the output side of a linear:

| base   | A                     | B                     | bias, magnitude `[out]` |
|--------|-----------------------|-----------------------|-------------------------|
| column | whole: sum over tp dp | split on 0: dp        | split on 0: dp          |
| row    | split on 1: dp        | whole: sum over tp dp | whole: as the residual  |
| whole  | whole: by its domain  | whole: by its domain  | whole: by its domain    |

Column A: dA = sum over the tp ranks of s (g_i B_i)^T x, as each rank holds only its own output features.
Row B: dB = s g^T (x A^T) and x A^T = sum over the tp ranks of x_i A_i^T, each rank holding one term. Bias and magnitude
come after that sum: what they see is the residual stream.

What is whole on every rank goes by its *domain*. PARTIAL, inside a split region: its output is used by local heads or
features only, so its gradient is one term: sum over tp dp. EQUAL, in a whole region or before the layers: every tp rank
computes the same thing from the same tokens: dp. RESIDUAL, between regions: as EQUAL, but under sp each rank has its
own tokens: sum over tp dp. The mean over tp where nothing is partial changes nothing where these computations agree to
the bit, and keeps the copies equal where kernels are not deterministic.

Rows that several tp ranks hold (a key/value head that serves query heads on all of them): each rank's gradient has the
terms of its own query heads, so these rows are summed over that part of tp besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from meshlora.plan.layout import Layout, Split
from meshlora.plan.rules import Domain, LinearRule, ParameterRule
from meshlora.plan.topology import copies_axis


class Side(StrEnum):
    """Which part of a linear a trained parameter is."""

    INPUT = "A"
    OUTPUT = "B"
    AFTER = "out"  # added or multiplied to the finished output: bias, magnitude


@dataclass(frozen=True)
class FactorRule:
    """How one trained parameter lies on the mesh.

    Attributes:
        split_dim: the dim that is split over tp, None where it is whole on every tp rank. layout: of that dim.
        grad_axes: axes over which its gradient is a partial sum and has to be added up.
        mean_axes: axes over which every rank computes its whole gradient by itself; the mean is taken.
    """

    split_dim: int | None
    grad_axes: frozenset[str]
    mean_axes: frozenset[str] = frozenset()
    layout: Layout | None = None

    def segments(self, *, rank: int, size: int) -> list[Segment]:
        """What tp rank `rank` of `size` holds, by the axes over which it is summed."""
        if self.split_dim is None or self.layout is None:
            return [Segment(0, 0, None, self.grad_axes, self.mean_axes, 1, is_whole=True)]
        if self.layout.copies(size) == {1}:
            return [Segment(self.split_dim, 0, None, self.grad_axes, self.mean_axes, 1)]
        found: list[Segment] = []
        start = 0
        for run in self.layout.runs(rank=rank, size=size):
            axes = self.grad_axes | ({copies_axis(run.copies)} if run.copies > 1 else set())
            last = found[-1] if found else None
            if last and last.copies == run.copies:
                found[-1] = Segment(self.split_dim, last.start, start + run.size, axes, self.mean_axes, run.copies)
            else:
                found.append(Segment(self.split_dim, start, start + run.size, axes, self.mean_axes, run.copies))
            start += run.size
        return found


@dataclass(frozen=True)
class Segment:
    """Rows `start:stop` (None: to the end) of dim `dim` of a local parameter that are summed over the same axes.

    copies: on how many neighbouring tp ranks they lie. is_whole: they are all there is, on every tp rank.
    """

    dim: int
    start: int
    stop: int | None
    grad_axes: frozenset[str]
    mean_axes: frozenset[str]
    copies: int
    is_whole: bool = False


def segment_of(tensor: Tensor, segment: Segment) -> Tensor:
    """The rows of `segment` in a local parameter, or in its gradient: a view."""
    stop = tensor.shape[segment.dim] if segment.stop is None else segment.stop
    return tensor.narrow(segment.dim, segment.start, stop - segment.start)


def factor_rule(rule: LinearRule, side: Side, *, sp: bool) -> FactorRule:
    """The rule of the parameter on `side` of the linear `rule`."""
    if rule.split is Split.COLUMN and side is not Side.INPUT:
        return FactorRule(0, frozenset({"dp"}), layout=rule.layout)
    if rule.split is Split.ROW and side is Side.INPUT:
        return FactorRule(1, frozenset({"dp"}), layout=rule.layout)
    if rule.split is Split.COLUMN or (rule.split is Split.ROW and side is Side.OUTPUT):
        return FactorRule(None, frozenset({"dp", "tp"}))
    return whole_rule(rule.domain, sp=sp)


def general_rules(*, sp: bool) -> list[tuple[str, Side, FactorRule]]:
    """(what the base is, which factor, its rule) for every kind of linear: the table of the module docstring."""
    bases = {
        "column": (Split.COLUMN, Domain.PARTIAL),
        "row": (Split.ROW, Domain.RESIDUAL),
        "whole, in a split region": (Split.WHOLE, Domain.PARTIAL),
        "whole, in a whole region": (Split.WHOLE, Domain.EQUAL),
        "whole, between regions": (Split.WHOLE, Domain.RESIDUAL),
    }
    return [
        (words, side, factor_rule(LinearRule("", split, 1, 1, True, domain=domain), side, sp=sp))
        for words, (split, domain) in bases.items()
        for side in Side
    ]


def whole_rule(domain: Domain, *, sp: bool) -> FactorRule:
    """The rule of a parameter that is whole on every tp rank."""
    if domain is Domain.PARTIAL or (domain is Domain.RESIDUAL and sp):
        return FactorRule(None, frozenset({"dp", "tp"}))
    return FactorRule(None, frozenset({"dp"}), mean_axes=frozenset({"tp"}))


def parameter_rule(rule: ParameterRule) -> FactorRule:
    """The rule of a split parameter that is no linear's."""
    return FactorRule(rule.dim, frozenset({"dp"}), layout=rule.layout)


def embedding_rule(rule: ParameterRule, side: Side) -> FactorRule:
    """Of LoRA on a vocabulary that is split: A `[r, V]` as the rows of the embedding; B sees one term of the sum."""
    if side is Side.INPUT:
        return FactorRule(1, frozenset({"dp"}), layout=rule.layout)
    return FactorRule(None, frozenset({"dp", "tp"}))
