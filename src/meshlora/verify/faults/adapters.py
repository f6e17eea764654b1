"""Adapters as they begin and what they compute: how factors are drawn, their scale, the magnitudes of DoRA."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshlora.adapter import attach
from meshlora.adapter import plan as adapter_plan
from meshlora.adapter.attach import runtime
from meshlora.layers import linear
from meshlora.layers.linear import ParallelLinear
from meshlora.plan.grads import Side
from meshlora.plan.layout import Split
from meshlora.plan.rules import LinearRule
from meshlora.verify.faults import wrong_code
from meshlora.verify.faults.fault import by_name, instead, mutation, then


def _b_drawn(found: dict[str, Tensor], *_: Any, init: bool | str, **__: Any) -> dict[str, Tensor]:
    return {part: t if t.any() else torch.full_like(t, 1e-3) for part, t in found.items()}


def row_magnitude_of_other_kind(original: Any) -> Any:
    """The sum over tp where each rank has all of it, the mean where each rank has a term."""

    def factor_rule(rule: LinearRule, side: Side, *, sp: bool) -> Any:
        found = original(rule, side, sp=sp)
        if rule.split is not Split.ROW or side is not Side.AFTER:
            return found
        return dataclasses.replace(found, grad_axes=found.grad_axes ^ {"tp"}, mean_axes=found.mean_axes ^ {"tp"})

    return factor_rule


def seed_of_rank(original: Any) -> Any:
    return lambda *args, seed, **rest: original(*args, seed=seed + wrong_code.rank(), **rest)


def other_b(factors: dict[str, Tensor], *_: Any, **__: Any) -> dict[str, Tensor]:
    return {part: t * (1 + 0.01 * wrong_code.rank()) if part.startswith("B") else t for part, t in factors.items()}


def local_fan_in(original: Any) -> Any:
    def attach(model: Any, name: str, planned: Any, full: Any, *rest: Any) -> None:
        plan = runtime(model).plan

        def wider(target: Any) -> dict[str, Tensor]:
            is_row = target.name in plan.linears and plan.linears[target.name].split is Split.ROW
            width = math.sqrt(plan.topology.tp) if is_row else 1.0
            return {part: t * width if part[0] == "A" else t for part, t in full(target).items()}

        original(model, name, planned, wider, *rest)

    return attach


def scaling(change: Callable[[float, int], float]) -> Callable[[Any], Any]:
    def replace(original: Any) -> Any:
        def add_adapter(self: ParallelLinear, name: str, factors: Any, *, scaling: float) -> None:
            original(self, name, factors, scaling=change(scaling, self.tp.size))

        return add_adapter

    return replace


def scale_of_fresh_squared(original: Any) -> Any:
    def attach(model: Any, name: str, planned: Any, full: Any, *rest: Any) -> None:
        squared = {n: dataclasses.replace(t, scaling=t.scaling**2) for n, t in planned.targets.items()}
        original(model, name, dataclasses.replace(planned, targets=squared), full, *rest)

    return attach


def norm_of_base_alone(original: Any) -> Any:
    """DoRA's norm without the adapter."""

    def weight_norm(self: ParallelLinear, adapter: str) -> Tensor:
        with mock.patch.dict(self.scaling, {adapter: 0.0}):
            return original(self, adapter)

    return weight_norm


OF_ADAPTERS = by_name(
    mutation(
        "a_drawn_per_rank",
        "a fresh A has the same bits on every rank and topology",
        "ranks",
        (attach, "draw_factors", seed_of_rank),
    ),
    mutation(
        "kaiming_on_local_fan_in",
        "the bound of a fresh A comes from the whole matrix' in_features",
        "tp row_target",
        (attach, "attach", local_fan_in),
    ),
    mutation(
        "b_unequal_on_replicas",
        "copies of a factor are equal to the bit",
        "tp",
        (attach, "draw_factors", then(other_b)),
    ),
    mutation(
        "lora_scale_divided_by_tp",
        "the LoRA scale does not know tp",
        "tp",
        (ParallelLinear, "add_adapter", scaling(lambda s, tp: s / tp)),
    ),
    mutation(
        "lora_scale_squared",
        "the LoRA scale is applied once",
        "scale",
        (ParallelLinear, "add_adapter", scaling(lambda s, tp: s * s)),
    ),
    mutation(
        "scale_of_fresh_squared",
        "a fresh adapter has the scale of its configuration",
        "scale",
        (attach, "attach", scale_of_fresh_squared),
    ),
    mutation(
        "dora_norm_over_local_slice",
        "the norm of a row that is split over tp is that of the whole row",
        "tp dora row_target",
        (linear, "all_reduce_sum", instead(lambda x, axis: x)),
    ),
    mutation(
        "dora_norm_of_base_alone",
        "DoRA divides by the norm of the weight with the adapter",
        "dora",
        (ParallelLinear, "weight_norm", norm_of_base_alone),
    ),
    mutation(
        "row_magnitude_summed_as_other_kind",
        "a row-parallel linear's magnitude is summed over tp under sp alone, as the residual stream is",
        "tp dora row_target",
        (adapter_plan, "factor_rule", row_magnitude_of_other_kind),
    ),
    mutation(
        "fresh_seed_ignored",
        "a fresh adapter is that of its seed",
        "seed",
        (attach, "draw_factors", lambda f: lambda *args, seed, **rest: f(*args, seed=0, **rest)),
    ),
    mutation(
        "fresh_b_not_zero",
        "a fresh adapter is the identity",
        "",
        (attach, "draw_factors", then(_b_drawn)),
    ),
)
