"""Gradient axes: over which mesh axes the gradient of a trained parameter is a partial sum.

Owns: the one place where they are derived from how the base is split. Does not own: the summing (`train.gradsync`),
what an axis cuts (`plan.topology`).

A gradient is a sum over every axis of its mesh but those that cut the parameter and those along which all ranks compute
it alike. Sequences and tokens are never alike: `dp` stands for all axes that cut them. What is left to say is of tp.

y = x W^T + s (x A^T) B^T with A `[r, in]` on the input side and B `[out, r]` on the output side of a linear:

| base   | A                     | B                     | bias, magnitude `[out]` |
|--------|-----------------------|-----------------------|-------------------------|
| column | whole: sum over tp dp | split on 0: dp        | split on 0: dp          |
| row    | split on 1: dp        | whole: sum over tp dp | whole: as the residual  |
| whole  | whole: by its domain  | whole: by its domain  | whole: by its domain    |

Column A: dA = sum over the tp ranks of s (g_i B_i)^T x, as each rank holds only its own output features; where x A^T
rides with a region's input (`layers.early_a`) of s (g B)^T_i x_i, as each rank has only its own tokens.
Row B: dB = s g^T (x A^T) and x A^T = sum over the tp ranks of x_i A_i^T, each rank holding one term. Bias and magnitude
come after that sum: what they see is the residual stream.

What is whole on every rank goes by its *domain*. PARTIAL, inside a split region: its output is used by local heads or
features only, so its gradient is one term: sum over tp dp. EQUAL, in a whole region or before the layers: every tp rank
computes the same thing from the same tokens: dp. RESIDUAL, between regions: as EQUAL, but under sp each rank has its
own tokens: sum over tp dp. The mean over tp where nothing is partial changes nothing where these computations agree to
the bit, and keeps the copies equal where kernels are not deterministic.

Rows that several tp ranks hold (a key/value head that serves query heads on all of them): each rank's gradient has the
terms of its own query heads, so these rows are summed over that part of tp besides.

Experts lie on axes of their own. Each rank has tokens of its own there, on its way to them or at home, so that nothing
is computed alike:

| expert matrix          | A `[E, r, in]`                   | B `[E, out, r]`                  |
|------------------------|----------------------------------|----------------------------------|
| first (gate, up)       | split on 0 (ep): sum over etp edp | split on 0 and 1 (ep, etp): edp |
| second (down)          | split on 0 and 2 (ep, etp): edp  | split on 0 (ep): sum over etp edp |
| one adapter for all    | as above without ep, which is summed over too |                     |

First A: each etp rank has the gradient of its own features of every token. Second B: x A^T is a sum over etp of which
each rank has one term. All tokens of an expert in its ep x etp block come to it, so that only edp is left to sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from torch import Tensor

from meshlora.plan.layout import Layout, Split
from meshlora.plan.rules import Domain, ExpertRule, LinearRule, ParameterRule
from meshlora.plan.topology import DENSE_AXES, EP, ETP, EXPERT_AXES, FEATURES, TP, copies_axis


class Side(StrEnum):
    """Which part of a linear a trained parameter is."""

    INPUT = "A"
    OUTPUT = "B"
    AFTER = "out"  # added or multiplied to the finished output: bias, magnitude


@dataclass(frozen=True)
class Cut:
    """One dim of a parameter that is split over one mesh axis, and how."""

    dim: int
    axis: str
    layout: Layout


@dataclass(frozen=True)
class FactorRule:
    """How one trained parameter lies on the mesh.

    Attributes:
        cuts: the dims that are split; none where it is whole on every rank.
        grad_axes: axes over which its gradient is a partial sum and has to be added up.
        mean_axes: axes over which every rank computes its whole gradient by itself; the mean is taken.
        is_expert: its axes are those of experts.
    """

    cuts: tuple[Cut, ...]
    grad_axes: frozenset[str]
    mean_axes: frozenset[str] = frozenset()
    is_expert: bool = False

    @property
    def replicas(self) -> frozenset[str]:
        """The axes along which all ranks hold the same of it."""
        return frozenset(EXPERT_AXES if self.is_expert else DENSE_AXES) - {cut.axis for cut in self.cuts}

    @property
    def split_dim(self) -> int | None:
        """The dim that is split over tp."""
        return next((cut.dim for cut in self.cuts if cut.axis == TP), None)

    def segments(self, *, rank: int, size: int) -> list[Segment]:
        """What tp rank `rank` of `size` holds, by the axes over which it is summed."""
        whole = Segment(0, 0, None, self.grad_axes, self.mean_axes, self.replicas)
        cut = next((cut for cut in self.cuts if cut.axis == TP), None)
        if cut is None or cut.layout.copies(size) == {1}:
            return [whole]
        found: list[Segment] = []
        start = 0
        for run in cut.layout.runs(rank=rank, size=size):
            stop = start + run.size
            over = {copies_axis(run.copies)} if run.copies > 1 else set()
            last = found[-1] if found else None
            if last and last.replicas == self.replicas | over:
                found[-1] = replace(last, stop=stop)
            else:
                own = Segment(cut.dim, start, stop, self.grad_axes | over, self.mean_axes, self.replicas | over)
                found.append(own)
            start = stop
        return found


@dataclass(frozen=True)
class Segment:
    """Rows `start:stop` (None: to the end) of dim `dim` of a local parameter that are summed over the same axes.

    replicas: the axes along which all ranks hold them, a `copies_axis` among them: their sizes make the number of ranks
        that hold each element.
    """

    dim: int
    start: int
    stop: int | None
    grad_axes: frozenset[str]
    mean_axes: frozenset[str]
    replicas: frozenset[str]


def segment_of(tensor: Tensor, segment: Segment) -> Tensor:
    """The rows of `segment` in a local parameter, or in its gradient: a view."""
    stop = tensor.shape[segment.dim] if segment.stop is None else segment.stop
    return tensor.narrow(segment.dim, segment.start, stop - segment.start)


def factor_rule(rule: LinearRule, side: Side, *, sp: bool) -> FactorRule:
    """The rule of the parameter on `side` of the linear `rule`."""
    if rule.split is Split.COLUMN and side is not Side.INPUT:
        return split_rule(0, rule.layout)
    if rule.split is Split.ROW and side is Side.INPUT:
        return split_rule(1, rule.layout)
    if rule.split is Split.COLUMN or (rule.split is Split.ROW and side is Side.OUTPUT):
        return whole_rule(Domain.PARTIAL, sp=sp)
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
        (words, side, factor_rule(LinearRule("", split, 1, 1, True, Layout.plain(1), domain), side, sp=sp))
        for words, (split, domain) in bases.items()
        for side in Side
    ]


def expert_rules() -> list[tuple[str, Side, FactorRule]]:
    """The same for projections of experts."""
    return [
        (
            f"experts, {words}" + (", one adapter for all" if is_shared else ""),
            side,
            expert_rule(ExpertRule("", split, 1, 1, False, Layout.plain(1)), side, is_shared=is_shared),
        )
        for is_shared in (False, True)
        for words, split in (("first (gate, up)", Split.COLUMN), ("second (down)", Split.ROW))
        for side in (Side.INPUT, Side.OUTPUT)
    ]


def split_rule(dim: int, layout: Layout | None) -> FactorRule:
    """The rule of a parameter of which each tp rank holds its own part along `dim`, with all of its gradient."""
    assert layout is not None
    return _rule(DENSE_AXES, Cut(dim, TP, layout))


def expert_rule(rule: ExpertRule, side: Side, *, is_shared: bool = False) -> FactorRule:
    """The rule of the factor A `[E, r, in]` or B `[E, out, r]` of all experts of a layer.

    is_shared: one adapter for all of them, A `[1, r, in]`, B `[1, out, r]`.
    """
    assert side is not Side.AFTER, rule
    cuts = [] if is_shared else [Cut(0, EP, Layout.plain(rule.num_experts))]
    if (rule.split is Split.COLUMN) == (side is Side.OUTPUT):
        assert rule.layout is not None
        cuts.append(Cut(1 if side is Side.OUTPUT else 2, ETP, rule.layout))
    return _rule(EXPERT_AXES, *cuts)


def whole_rule(domain: Domain, *, sp: bool) -> FactorRule:
    """The rule of a parameter that is whole on every tp rank."""
    is_term = domain is Domain.PARTIAL or (domain is Domain.RESIDUAL and sp)
    return _rule(DENSE_AXES, alike=frozenset() if is_term else FEATURES)


def embedding_rule(rule: ParameterRule, side: Side) -> FactorRule:
    """Of LoRA on a vocabulary that is split: A `[r, V]` as the rows of the embedding; B sees one term of the sum."""
    if side is Side.INPUT:
        return split_rule(1, rule.layout)
    return whole_rule(Domain.PARTIAL, sp=False)


def _rule(axes: tuple[str, ...], *cuts: Cut, alike: frozenset[str] = frozenset()) -> FactorRule:
    """The rule of a parameter on the mesh of `axes`: a term of its gradient along each that neither cuts it nor
    computes it `alike`. Sequences and tokens are never alike, and no parameter is cut by them.
    """
    terms = frozenset(axes) - {cut.axis for cut in cuts} - alike
    return FactorRule(cuts, terms, alike, is_expert=axes is EXPERT_AXES)
