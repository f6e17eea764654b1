"""Gradient axes: over which mesh axes the gradient of an adapter factor is a partial sum.

Owns: the one place where they are derived from how the base is split. Does not own: the summing (`train.gradsync`).

y = x W^T + s (x A^T) B^T with A `[r, in]` on the input side and B `[out, r]` on the output side of a linear:

| base   | A                     | B                     |
|--------|-----------------------|-----------------------|
| column | whole: sum over tp dp | split on 0: dp        |
| row    | split on 1: dp        | whole: sum over tp dp |
| whole  | whole: dp, mean of tp | whole: dp, mean of tp |

Column A: dA = sum over the tp ranks of s (g_i B_i)^T x, as each rank holds only its own output features.
Row B: dB = s g^T (x A^T) and x A^T = sum over the tp ranks of x_i A_i^T, each rank holding one term.
Whole: every tp rank computes the same thing from the same tokens, so nothing is partial over tp. This holds under sp
too, as a whole region gathers all tokens, and its output slice sends back the whole gradient. The mean over tp changes
nothing where these computations agree to the bit, and keeps the copies equal where kernels are not deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshlora.plan.rules import Split


class Side(StrEnum):
    """Which side of a linear a LoRA factor sits on."""

    INPUT = "A"
    OUTPUT = "B"


@dataclass(frozen=True)
class FactorRule:
    """How one LoRA factor lies on the mesh.

    Attributes:
        split_dim: the dim that is split over tp, None where the factor is whole on every tp rank.
        grad_axes: axes over which its gradient is a partial sum and has to be added up.
        mean_axes: axes over which every rank computes its whole gradient by itself; the mean is taken.
    """

    split_dim: int | None
    grad_axes: frozenset[str]
    mean_axes: frozenset[str] = frozenset()


_RULES = {
    (Split.COLUMN, Side.INPUT): FactorRule(None, frozenset({"dp", "tp"})),
    (Split.COLUMN, Side.OUTPUT): FactorRule(0, frozenset({"dp"})),
    (Split.ROW, Side.INPUT): FactorRule(1, frozenset({"dp"})),
    (Split.ROW, Side.OUTPUT): FactorRule(None, frozenset({"dp", "tp"})),
    (Split.WHOLE, Side.INPUT): FactorRule(None, frozenset({"dp"}), mean_axes=frozenset({"tp"})),
    (Split.WHOLE, Side.OUTPUT): FactorRule(None, frozenset({"dp"}), mean_axes=frozenset({"tp"})),
}


def factor_rule(split: Split, side: Side) -> FactorRule:
    """The rule of the factor on `side` of a linear that is split as `split`."""
    return _RULES[split, side]
