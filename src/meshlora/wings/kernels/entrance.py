"""How x enters a linear that shares work with others: what `ParallelLinear.enter` is in a model.

Owns: asking what is known of x, and which linears have their products with A together. Does not own: how it came to be
known (`wings.kernels.early_a`, `wings.kernels.gate_recompute`, `wings.kernels.shared_input`), the products
(`layers.products`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from meshlora.layers.linear import ParallelLinear
from meshlora.layers.products import Entered
from meshlora.plan.rules import ModelPlan
from meshlora.wings.kernels.early_a import rode_along
from meshlora.wings.kernels.gate_recompute import product_behind
from meshlora.wings.kernels.shared_input import Joined, share


class Entrance:
    """Of one linear.

    has_neighbours: whether other linears may share its input. together: those known to, and itself; they have their
        products with A together.
    """

    def __init__(self, *, has_neighbours: bool, together: Sequence[ParallelLinear] = ()) -> None:
        self.has_neighbours, self.together = has_neighbours, together

    def __call__(self, leaf: ParallelLinear, x: Tensor) -> Entered:
        """x `[..., in]`, of a linear with an adapter."""
        z = rode_along(leaf, x)  # computed before the gather of x
        source = product_behind(x) if z is None else None
        if not self.has_neighbours:
            return Entered(x, z, source)
        joined = self._joined(leaf, x) if z is None and source is None else None
        shared = share(x, joined)
        if shared is None:
            return Entered(x, z, source)
        take_dz = None
        if z is None:
            z, take_dz = shared.zs.get(leaf), shared.takes.get(leaf)
        # Detached: the gradient of x goes through the token, once for all linears.
        return Entered(x.detach(), z, source, shared.gradient, shared.token, take_dz)

    def _joined(self, own: ParallelLinear, x: Tensor) -> Joined | None:
        """The linears together with `own`, for one product of x with all A; None if one has dropout or another s."""
        leaves: list[ParallelLinear] = []
        names: list[str] = []
        for leaf in self.together:
            name = leaf.in_use
            if name is None or leaf.in_features != x.shape[-1]:
                continue
            if leaf.mask(name, x) is not None:  # each linear has a mask of its own
                return None
            leaves.append(leaf)
            names.append(name)
        scales = {leaf.scaling[name] for leaf, name in zip(leaves, names, strict=True)}
        if len(leaves) < 2 or len(scales) > 1 or own not in leaves:
            return None
        factors = [leaf.factor_a(name) for leaf, name in zip(leaves, names, strict=True)]
        return Joined(leaves, factors, scales.pop())


def connect_linears(model: nn.Module, plan: ModelPlan) -> None:
    """Give each parallel linear of `model` its entrance, where others are called with the same input."""
    groups: dict[frozenset[str], list[ParallelLinear]] = {}
    for leaf in model.modules():
        if not isinstance(leaf, ParallelLinear):
            continue
        name = leaf.rule.name
        together: list[ParallelLinear] = []
        if name in plan.together:
            together = groups.setdefault(plan.together[name], together)  # one list: it grows for those before, too
            together.append(leaf)
        leaf.enter = Entrance(has_neighbours=name in plan.neighbours, together=together)
