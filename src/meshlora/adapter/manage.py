"""Adapters on a parallel model: adding, choosing, switching off, gathering.

Owns: what a parallel model knows about its adapters (`Runtime`, at `model.meshlora`).
Does not own: files (`adapter.peft_format`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from meshlora.adapter.initialization import draw_factors
from meshlora.adapter.targets import Target, final_config, resolve_targets
from meshlora.errors import UserError, did_you_mean
from meshlora.parallel.collectives import all_gather
from meshlora.parallel.groups import Mesh
from meshlora.parallel.inject import adopt_whole_linear, parallel_linears
from meshlora.plan.grads import FactorRule, Side, factor_rule
from meshlora.plan.rules import ModelPlan


@dataclass(frozen=True)
class Adapter:
    """One named adapter: the configuration to store and what it sits on."""

    name: str
    config: LoraConfig
    targets: Mapping[str, Target]


@dataclass
class Runtime:
    """What a parallel model knows about itself."""

    plan: ModelPlan
    mesh: Mesh
    source: str | None
    adapters: dict[str, Adapter] = field(default_factory=dict)
    active: str | None = None


@dataclass(frozen=True)
class Factor:
    """One LoRA factor on this rank: its name as PEFT stores it, the local parameter, and how it lies on the mesh."""

    name: str
    parameter: nn.Parameter
    rule: FactorRule


def runtime(model: nn.Module) -> Runtime:
    """The `Runtime` of a model that `meshlora.load` returned.

    Raises:
        UserError: it is some other model.
    """
    found = getattr(model, "meshlora", None)
    if not isinstance(found, Runtime):
        raise UserError(f"{type(model).__name__}", "it is not a parallel model", "make it with meshlora.load")
    return found


def add_adapter(model: Any, name: str, config: LoraConfig, *, seed: int = 0) -> None:
    """Draw a fresh adapter and attach it, frozen until `set_adapter`. `config` is not changed.

    Raises:
        UserError: the name is taken, or the configuration does not fit the model.
    """
    state = runtime(model)
    targets = resolve_targets(model, state.plan, config)
    full = {
        target.name: draw_factors(target, state.plan.linears[target.name], init=config.init_lora_weights, seed=seed)
        for target in targets.values()
    }
    attach(model, name, config, targets, full)


def attach(
    model: Any, name: str, config: LoraConfig, targets: Mapping[str, Target], full: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Attach the adapter whose full factors are `full[module]["A" | "B"]`; each rank keeps its slices."""
    state = runtime(model)
    if name in state.adapters:
        raise UserError(f"adapter {name!r}", "the model has one of that name already", "choose another name")
    if not name or "." in name:
        raise UserError(f"adapter {name!r}", "a name is not empty and holds no dot")
    dtype = factor_dtype(model)
    for target in targets.values():
        module = adopt_whole_linear(model, state.plan.linears[target.name], state.mesh.tp)
        local = {
            side: local_part(factor, factor_rule(module.rule.split, Side(side)), state.mesh).to(
                state.mesh.device, dtype
            )
            for side, factor in full[target.name].items()
        }
        module.add_adapter(name, local, scaling=target.scaling)
    state.adapters[name] = Adapter(name, final_config(config, targets, state.plan), dict(targets))


def set_adapter(model: Any, name: str | None) -> None:
    """Make `name` the active, trainable adapter; None: the base alone, nothing trainable.

    Raises:
        UserError: there is no such adapter.
    """
    state = runtime(model)
    if name is not None and name not in state.adapters:
        raise UserError(f"adapter {name!r}", "the model has no such adapter", did_you_mean(name, state.adapters))
    state.active = name
    for module in parallel_linears(model).values():
        module.active = name
        for factors in (module.lora_A, module.lora_B):
            for owner, parameter in factors.items():
                parameter.requires_grad_(owner == name)


@contextlib.contextmanager
def disable_adapter(model: Any) -> Iterator[None]:
    """Inside the block the model is its base; which adapter is active and trainable is as before afterwards."""
    modules = parallel_linears(model).values()
    before = [module.active for module in modules]
    try:
        for module in modules:
            module.active = None
        yield
    finally:
        for module, active in zip(modules, before, strict=True):
            module.active = active


def active_factors(model: Any) -> list[Factor]:
    """The factors of the active adapter on this rank, in module order.

    Raises:
        UserError: no adapter is active.
    """
    state = runtime(model)
    if state.active is None:
        raise UserError("no active adapter", "there is nothing to train", "call set_adapter, or give lora= to load")
    return adapter_factors(model, state.active)


def adapter_factors(model: Any, adapter: str) -> list[Factor]:
    """The factors of `adapter` on this rank, in module order."""
    return [
        Factor(f"{name}.lora_{side}", factors[adapter], factor_rule(module.rule.split, side))
        for name, module in parallel_linears(model).items()
        for side, factors in ((Side.INPUT, module.lora_A), (Side.OUTPUT, module.lora_B))
        if adapter in factors
    ]


def gather_adapter(model: Any, adapter: str) -> dict[str, Tensor]:
    """Name -> full factor on the CPU, on every rank. Collective: all ranks must call it."""
    mesh = runtime(model).mesh
    return {f.name: full_factor(f.parameter.detach(), f.rule, mesh).cpu() for f in adapter_factors(model, adapter)}


def full_factor(local: Tensor, rule: FactorRule, mesh: Mesh) -> Tensor:
    """Put the slices of one factor (or of its gradient) together again. Collective over tp where it is split."""
    if rule.split_dim is None:
        return local
    moved = local.movedim(rule.split_dim, 0)
    return all_gather(moved, mesh.tp).movedim(0, rule.split_dim).contiguous()


def local_part(full: Tensor, rule: FactorRule, mesh: Mesh) -> Tensor:
    """This rank's slice of a full factor; a copy, as the factors of several adapters must not share memory."""
    if rule.split_dim is None:
        return full.clone()
    return full.tensor_split(mesh.tp.size, rule.split_dim)[mesh.tp.rank].clone(memory_format=torch.contiguous_format)


def factor_dtype(model: Any) -> torch.dtype:
    """Factors train in fp32, whatever the base is stored in; in float64 beside a float64 base."""
    return torch.float64 if model.dtype == torch.float64 else torch.float32
