"""LoRA on routers that hold their weight themselves: transformers' modules other than linears.

Owns: the adapter around the weight. Does not own: routers that are linears (`layers.linear`), routing.

A router stays the model's own and whole on every rank. Its matrix is small, `[experts, H]`, so W + s B A is computed
whenever it is read: by a torch parametrization, transparent to the router's own code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from meshlora.layers.adapted import AdaptedLeaf
from meshlora.plan.rules import LinearRule, ModelPlan


class RouterAdapter(AdaptedLeaf):
    """W `[E, H]` -> W + s B A with the adapter in use."""

    rounds_factors = False  # its sum is of W's dtype, once

    def __init__(self, rule: LinearRule) -> None:
        super().__init__(rule.in_features, rule.out_features)
        self.rule = rule

    def name_at(self, path: str) -> str:
        """The router's, not that of the parametrization of its weight."""
        return path.partition(".parametrizations.")[0]

    def forward(self, weight: Tensor) -> Tensor:
        if self.in_use is None:  # none is active, or it is switched off
            return weight
        a, b = (factor.to(weight.dtype) for factor in self.factors(self.in_use))
        return torch.addmm(weight, b, a, alpha=self.scaling[self.in_use])


def adopt_router(module: nn.Module, plan: ModelPlan, name: str) -> RouterAdapter | None:
    """The adapter around the weight of `module`, created with the first one, if it is a router that holds it itself."""
    if name not in plan.matrices:
        return None
    if parametrize.is_parametrized(module, "weight"):
        lists: nn.ModuleDict = module.parametrizations  # type: ignore[assignment]
        found = lists["weight"][0]  # type: ignore[index]
        assert isinstance(found, RouterAdapter)
        return found
    adapter = RouterAdapter(plan.matrices[name])
    parametrize.register_parametrization(module, "weight", adapter)
    return adapter
