"""`lora_bias`: B of a linear has a bias c, `y = x W^T + b + s (D(x) A^T B^T + c)`.

It lies on ranks as B does: of a column-parallel linear each has its rows of c, of a row-parallel one all of it, beside
its term of B's product. One of them adds c to that sum, so that the gradient of c is a sum over tp, too.
"""

from __future__ import annotations

from torch import Tensor

from meshlora.layers.adapted import Variant
from meshlora.layers.linear import ParallelLinear
from meshlora.layers.tokens import Mask
from meshlora.plan.layout import Split


class BiasOfB(Variant):
    """The bias c `[out_local]` of B, the part `bias`."""

    def product(self, leaf: ParallelLinear, adapter: str, y: Tensor, x: Tensor, mask: Mask | None) -> Tensor:
        return y + self.parts["bias"].to(y.dtype) * share_of_bias(leaf, adapter)


def share_of_bias(leaf: ParallelLinear, adapter: str) -> float:
    """s where this rank adds c; 0 where another one does: a factor, so that c has a gradient on every rank."""
    if leaf.rule.split is Split.ROW and leaf.tp.rank > 0:
        return 0.0
    return leaf.scaling[adapter]
