"""Gradient axes: the mesh axes over which the gradient of a trained parameter is a partial sum.

Owns: deriving them, in one place, from how the base is split. Does not own: the reduction (`train.gradsync`), what an
axis cuts (`meshlora_ground.topology`).

A gradient is a partial sum over every axis of its mesh except those that split the parameter and those along which all
ranks compute the same gradient. `dp` below stands for all axes that cut sequences or tokens: along these, ranks never
compute the same. The rest is about tp. For y = x W^T + s (x A^T) B^T with A `[r, in]`, B `[out, r]`:

| base   | A                     | B, its bias, magnitude| bias `[out]`           |
|--------|-----------------------|-----------------------|------------------------|
| column | whole: sum over tp dp | split on 0: dp        | split on 0: dp         |
| row    | split on 1: dp        | whole: sum over tp dp | whole: as the residual |
| whole  | whole: by its domain  | whole: by its domain  | whole: by its domain   |

Column A: dA = sum over the tp ranks of s (g_i B_i)^T x, as each rank holds only its own output features; where x A^T
is gathered with a region's input (`wings.kernels.early_a`), of s (g B)^T_i x_i, as each rank has only its own tokens.
Row B: dB = s g^T (x A^T) and x A^T = sum over the tp ranks of x_i A_i^T, each rank holding one term. Magnitudes scale
these terms, and a bias of B is added to one of them; the bias of the base comes after the sum, on the residual stream.

The axes of parameters that are whole on every rank depend on their *domain*. Where nothing is partial, the mean over tp
is taken: a no-op if the ranks' results agree to the bit, it keeps the copies equal when kernels are not deterministic.

Rows replicated on several tp ranks (a key/value head that serves query heads on all of them): each rank's gradient has
the terms of its own query heads, so these rows are also summed over that part of tp.

Experts have their own mesh, along whose axes each rank has its own tokens: ranks never compute the same. Their table,
those of domains, and the reasons are in docs/parallelism.md, "Grad axes".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from torch import Tensor

from meshlora.plan.layout import Layout, Split
from meshlora.plan.rules import Domain, ExpertRule, LinearRule, ParameterRule
from meshlora_ground.topology import DENSE_AXES, EP, ETP, EXPERT_AXES, FEATURES, LAYERS, TP, copies_axis


class Side(StrEnum):
    """The side of a linear on which a trained parameter acts."""

    INPUT = "A"
    OUTPUT = "B"
    AFTER = "out"  # applied to the finished output: the bias of the base


@dataclass(frozen=True)
class Cut:
    """The split of one dim of a parameter over one mesh axis."""

    dim: int
    axis: str
    layout: Layout


@dataclass(frozen=True)
class FactorRule:
    """How one trained parameter is placed on the mesh.

    Attributes:
        cuts: its split dims; empty if it is whole on every rank.
        grad_axes: axes over which its gradient is a partial sum, to be added up.
        mean_axes: axes along which every rank computes its full gradient; the mean is taken.
        is_expert: whether its axes are those of the expert mesh.
    """

    cuts: tuple[Cut, ...]
    grad_axes: frozenset[str]
    mean_axes: frozenset[str] = frozenset()
    is_expert: bool = False

    @property
    def replicas(self) -> frozenset[str]:
        """The axes along which all ranks hold the same values."""
        return frozenset(EXPERT_AXES if self.is_expert else DENSE_AXES) - {cut.axis for cut in self.cuts} - LAYERS

    @property
    def split_dim(self) -> int | None:
        """The dim split over tp, if any."""
        return self._cut_over_tp.dim if self._cut_over_tp is not None else None

    @property
    def _cut_over_tp(self) -> Cut | None:
        return next((cut for cut in self.cuts if cut.axis == TP), None)

    def parts(self, *, rank: int, size: int) -> list[GradPart]:
        """The part held by tp rank `rank` of `size`, divided by the axes over which its gradient is summed."""
        whole = GradPart(0, 0, None, self.grad_axes, self.mean_axes, self.replicas)
        cut = self._cut_over_tp
        if cut is None or cut.layout.copies(size) == {1}:
            return [whole]
        found: list[GradPart] = []
        start = 0
        for run in cut.layout.runs(rank=rank, size=size):
            stop = start + run.size
            over = set[str]()
            if run.copies > 1:  # each of these ranks has the terms of its own query heads
                over.add(copies_axis(run.copies))
            if found and found[-1].replicas == self.replicas | over:
                found[-1] = replace(found[-1], stop=stop)
            else:
                own = GradPart(cut.dim, start, stop, self.grad_axes | over, self.mean_axes, self.replicas | over)
                found.append(own)
            start = stop
        return found


@dataclass(frozen=True)
class GradPart:
    """Rows `start:stop` (None: to the end) of dim `dim` of a local parameter, with gradients summed over the same axes.

    replicas: the axes along which all ranks hold these rows, possibly a `copies_axis`. The product of their sizes is
        the number of ranks that hold each element.
    """

    dim: int
    start: int
    stop: int | None
    grad_axes: frozenset[str]
    mean_axes: frozenset[str]
    replicas: frozenset[str]


def part_of(tensor: Tensor, part: GradPart) -> Tensor:
    """View of the rows of `part` in a local parameter or its gradient."""
    stop = tensor.shape[part.dim] if part.stop is None else part.stop
    return tensor.narrow(part.dim, part.start, stop - part.start)


def factor_rule(rule: LinearRule, side: Side, *, sp: bool) -> FactorRule:
    """The rule of the parameter on `side` of the linear `rule`."""
    if rule.split is Split.COLUMN and side is not Side.INPUT:
        return split_rule(0, rule.layout)
    if rule.split is Split.ROW and side is Side.INPUT:
        return split_rule(1, rule.layout)
    if rule.split is Split.COLUMN or (rule.split is Split.ROW and side is Side.OUTPUT):
        return whole_rule(Domain.PARTIAL, sp=sp)
    return whole_rule(rule.domain, sp=sp)


def split_rule(dim: int, layout: Layout | None) -> FactorRule:
    """The rule of a parameter split over tp along `dim`: each rank has the full gradient of its part."""
    assert layout is not None
    return _rule(DENSE_AXES, Cut(dim, TP, layout))


def expert_rule(rule: ExpertRule, side: Side, *, is_shared: bool = False) -> FactorRule:
    """The rule of the factor A `[E, r, in]` or B `[E, out, r]` of all experts of a layer.

    is_shared: one adapter for all experts, A `[1, r, in]`, B `[1, out, r]`.
    """
    assert side is not Side.AFTER, rule
    cuts = []
    if not is_shared:
        cuts.append(Cut(0, EP, rule.with_factors))
    # B of the first projection has its outputs in dim 1, A of the second its inputs in dim 2.
    if rule.split is Split.COLUMN and side is Side.OUTPUT:
        cuts.append(Cut(1, ETP, rule.layout))
    elif rule.split is Split.ROW and side is Side.INPUT:
        cuts.append(Cut(2, ETP, rule.layout))
    return _rule(EXPERT_AXES, *cuts)


def whole_rule(domain: Domain, *, sp: bool) -> FactorRule:
    """The rule of a parameter that is whole on every tp rank."""
    # Under sp the residual stream of each rank has other tokens.
    is_term = domain is Domain.PARTIAL or (domain is Domain.RESIDUAL and sp)
    return _rule(DENSE_AXES, alike=frozenset() if is_term else FEATURES)


def embedding_rule(rule: ParameterRule, side: Side) -> FactorRule:
    """The rule of LoRA on a split vocabulary: A `[r, V]` is split like the embedding; B sees one term of the sum."""
    if side is Side.INPUT:
        return split_rule(1, rule.layout)
    # A rank looks up the tokens of its own rows alone, so x A^T is one term.
    return whole_rule(Domain.PARTIAL, sp=False)


def _rule(axes: tuple[str, ...], *cuts: Cut, alike: frozenset[str] = frozenset()) -> FactorRule:
    """The rule of a parameter on the mesh of `axes`. Its gradient is partial along every axis that neither cuts it nor
    has ranks that compute it `alike`. Stages of layers hold other parameters altogether.
    """
    terms = frozenset(axes) - {cut.axis for cut in cuts} - alike - LAYERS
    return FactorRule(cuts, terms, alike, is_expert=axes is EXPERT_AXES)
