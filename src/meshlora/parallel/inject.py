"""Injection: replace the leaves of a Hugging Face model by parallel ones, by name, from a plan.

Owns: which leaves are replaced, and freezing the base. Does not own: weights (`state.weights`), adapters (`adapter`).
"""

from __future__ import annotations

import torch
from torch import nn

from meshlora.parallel.groups import Axis, Mesh
from meshlora.parallel.linear import ParallelLinear
from meshlora.parallel.region import install_borders
from meshlora.plan.rules import LinearRule, ModelPlan, Split


def parallelize(model: nn.Module, plan: ModelPlan, mesh: Mesh, *, targets: set[str], dtype: torch.dtype) -> None:
    """Replace in place, on the meta device, every split linear and every whole linear that gets an adapter.

    The base is frozen. What is not replaced stays the model's own.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, rule in plan.linears.items():
        if rule.split is Split.WHOLE and name not in targets:
            continue
        leaf = ParallelLinear(
            rule, mesh.tp, scatters_tokens=plan.topology.sp and rule.split is Split.ROW, dtype=dtype, device="meta"
        )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, leaf)
    install_borders(model, plan, mesh.tp)


def parallel_linears(model: nn.Module) -> dict[str, ParallelLinear]:
    """Name -> parallel linear, in module order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ParallelLinear)}


def adopt_whole_linear(model: nn.Module, rule: LinearRule, tp: Axis) -> ParallelLinear:
    """The parallel linear named by `rule`; a whole linear that is still the model's own is wrapped, weights shared."""
    module = model.get_submodule(rule.name)
    if isinstance(module, ParallelLinear):
        return module
    assert isinstance(module, nn.Linear), type(module)
    assert isinstance(module.weight, nn.Parameter)
    assert rule.split is Split.WHOLE, rule
    leaf = ParallelLinear(rule, tp, scatters_tokens=False, dtype=module.weight.dtype, device="meta")
    leaf.weight = module.weight
    leaf.register_parameter("bias", module.bias)
    parent, _, child = rule.name.rpartition(".")
    setattr(model.get_submodule(parent), child, leaf)
    return leaf
