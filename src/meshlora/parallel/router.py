"""LoRA on routers that own their weight: modules of transformers that are no linears.

Owns: the adapter around the weight. Does not own: routers that are linears (`parallel.linear`), routing.

A router stays the model's own and whole on every rank. Its matrix is small, `[experts, H]`, so W + s B A is made of it
whenever it is read: as a parametrization of torch, which the router's own code does not notice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from meshlora.plan.rules import LinearRule


class RouterAdapter(nn.Module):
    """W `[E, H]` -> W + s B A with the adapter in use; the words are those of `ParallelLinear`."""

    def __init__(self, rule: LinearRule) -> None:
        super().__init__()
        self.rule = rule
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.scaling: dict[str, float] = {}
        self.active: str | None = None

    def add_adapter(self, name: str, factors: Mapping[str, Tensor], *, scaling: float) -> None:
        """Attach factors `{"A": [r, H], "B": [E, r]}` as adapter `name`; frozen until set."""
        assert set(factors) == {"A", "B"}, list(factors)
        self.lora_A[name] = nn.Parameter(factors["A"], requires_grad=False)
        self.lora_B[name] = nn.Parameter(factors["B"], requires_grad=False)
        self.scaling[name] = scaling

    def trained(self, adapter: str) -> dict[str, nn.Parameter]:
        """What of `adapter` sits here, under the names of `add_adapter`."""
        return {"A": self.lora_A[adapter], "B": self.lora_B[adapter]} if adapter in self.scaling else {}

    def forward(self, weight: Tensor) -> Tensor:
        name = self.active
        if name is None or name not in self.scaling:
            return weight
        a, b = self.lora_A[name].to(weight.dtype), self.lora_B[name].to(weight.dtype)
        return torch.addmm(weight, b, a, alpha=self.scaling[name])


def adapt_router(module: nn.Module, rule: LinearRule) -> RouterAdapter:
    """The adapter around the weight of `module`; made where there is none yet."""
    if parametrize.is_parametrized(module, "weight"):
        lists: nn.ModuleDict = module.parametrizations  # type: ignore[assignment]
        found = lists["weight"][0]  # type: ignore[index]
        assert isinstance(found, RouterAdapter)
        return found
    adapter = RouterAdapter(rule)
    parametrize.register_parametrization(module, "weight", adapter)
    return adapter


def router_of(path: str) -> str:
    """The name of the router whose adapter is the module at `path`."""
    return path.partition(".parametrizations.")[0]
