"""Faults of adapters: initial factors (EVA, too), LoRA scale, DoRA magnitudes, biases of B, tokens that invoke them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig
from torch import Tensor

from meshlora.adapter import attach, initialization
from meshlora.adapter import plan as adapter_plan
from meshlora.adapter.attach import runtime
from meshlora.adapter.targets.resolve import Target
from meshlora.layers.linear import ParallelLinear
from meshlora.plan.layout import Split
from meshlora.plan.rules import ModelPlan
from meshlora.run import calibration
from meshlora.verify.faults.fault import after, around, instead_of, passing, rank, result, unreduced
from meshlora.verify.features import Feature
from meshlora.wings.invoked import linear, rows
from meshlora.wings.starts import eva
from meshlora.wings.variants import bias_of_b, magnitudes
from meshlora.wings.variants.magnitudes import Magnitudes


@around(attach, "attach", needs={Feature.TP, Feature.ROW_TARGET})
def kaiming_on_local_fan_in(original: Any, model: Any, name: str, planned: Any, full: Any, *rest: Any) -> None:
    """the bound of a fresh A comes from the whole matrix' in_features"""
    plan = runtime(model).plan

    def wider(target: Any) -> dict[str, Tensor]:
        is_row = target.name in plan.linears and plan.linears[target.name].split is Split.ROW
        width = math.sqrt(plan.topology.tp) if is_row else 1.0  # a bound is 1 / sqrt(fan_in)
        return {part: t * width if part[0] == "A" else t for part, t in full(target).items()}

    original(model, name, planned, wider, *rest)


@after(initialization, "draw_factors", needs={Feature.TP})
def b_unequal_on_replicas(factors: dict[str, Tensor], *_: Any, **__: Any) -> dict[str, Tensor]:
    """copies of a factor are equal to the bit"""
    return {part: t * (1 + 0.01 * rank()) if part.startswith("B") else t for part, t in factors.items()}


@around(ParallelLinear, "add_adapter", needs={Feature.TP})
def lora_scale_divided_by_tp(original: Any, self: ParallelLinear, *args: Any, scaling: float) -> None:
    """the LoRA scale does not know tp"""
    original(self, *args, scaling=scaling / self.tp.size)


@around(attach, "attach", needs={Feature.SCALE})
def scale_of_fresh_squared(original: Any, model: Any, name: str, planned: Any, *rest: Any) -> None:
    """a fresh adapter has the scale of its configuration"""
    squared = {n: dataclasses.replace(t, scaling=t.scaling**2) for n, t in planned.targets.items()}
    original(model, name, dataclasses.replace(planned, targets=squared), *rest)


dora_norm_over_local_slice = instead_of(
    magnitudes, "all_reduce_sum", needs={Feature.TP, Feature.DORA, Feature.ROW_TARGET}
)(unreduced("the norm of a row that is split over tp is that of the whole row"))


@around(magnitudes, "weight_norm", needs={Feature.DORA})
def dora_norm_of_base_alone(original: Any, leaf: Any, adapter: str) -> Any:
    """DoRA divides by the norm of the weight with the adapter"""
    with mock.patch.dict(leaf.scaling, {adapter: 0.0}):  # adds nothing to the base
        return original(leaf, adapter)


@after(adapter_plan, "rule_of_part", needs={Feature.TP, Feature.DORA, Feature.ROW_TARGET})
def row_magnitude_of_one_rank(found: Any, plan: ModelPlan, target: Target, part: str) -> Any:
    """a row-parallel linear's magnitude is summed over tp: each rank scales a term of the output"""
    if part != "magnitude" or found.cuts or "tp" not in found.grad_axes:
        return found
    return dataclasses.replace(found, grad_axes=found.grad_axes - {"tp"}, mean_axes=found.mean_axes | {"tp"})


@around(magnitudes, "kept_of_base", needs={Feature.DORA, Feature.LORA_DROPOUT})
def dora_scales_the_base_without_dropout(original: Any, leaf: Any, x: Tensor, mask: Any) -> Any:
    """what magnitudes change of the base's product is of the dropped input"""
    return original(leaf, x, mask) * 0.0


@around(magnitudes, "kept_of_base", needs={Feature.DORA, Feature.LORA_DROPOUT})
def dora_draws_anew_for_the_base(original: Any, leaf: Any, x: Tensor, mask: Any) -> Any:
    """the base's term of DoRA and the adapter's see the same dropped input"""
    return original(leaf, x, dataclasses.replace(mask, key=mask.key ^ 1))


@around(Magnitudes, "product", needs={Feature.DORA, Feature.LORA_DROPOUT})
def dora_drops_all_of_the_base(original: Any, self: Any, leaf: Any, name: str, y: Tensor, x: Tensor, mask: Any) -> Any:
    """the base's own product, to which DoRA adds, is of the whole input"""
    if mask is None:
        return original(self, leaf, name, y, x, mask)
    return original(self, leaf, name, y - magnitudes.kept_of_base(leaf, x, mask), x, None)


@after(bias_of_b, "share_of_bias", needs={Feature.TP, Feature.LORA_BIAS, Feature.ROW_TARGET})
def bias_of_b_added_on_each_rank(_: float, leaf: ParallelLinear, adapter: str) -> float:
    """the bias of B is added once to the sum that a row-parallel linear gives"""
    return leaf.scaling[adapter]


@after(bias_of_b, "share_of_bias", needs={Feature.LORA_BIAS, Feature.SCALE})
def bias_of_b_not_scaled(found: float, leaf: ParallelLinear, adapter: str) -> float:
    """the bias of B has the scale of LoRA, as B's product has"""
    return found / leaf.scaling[adapter]


@after(adapter_plan, "rule_of_part", needs={Feature.TP, Feature.LORA_BIAS, Feature.ROW_TARGET})
def row_bias_of_b_of_one_rank(found: Any, plan: ModelPlan, target: Target, part: str) -> Any:
    """the gradient of a row-parallel linear's bias of B is summed over tp: one rank has it"""
    if part != "bias" or found.cuts or "tp" not in found.grad_axes:
        return found
    return dataclasses.replace(found, grad_axes=found.grad_axes - {"tp"}, mean_axes=found.mean_axes | {"tp"})


@after(initialization, "draw_factors")
def fresh_b_not_zero(found: dict[str, Tensor], *_: Any, **__: Any) -> dict[str, Tensor]:
    """a fresh adapter is the identity"""
    return {part: t if t.any() else torch.full_like(t, 1e-3) for part, t in found.items()}


@around(eva, "whole_features", needs={Feature.EVA, Feature.TP, Feature.ROW_TARGET})
def eva_features_of_one_rank(original: Any, leaf: Any, rows: Tensor) -> Tensor:
    """the input of a row-parallel linear has the features of all tp ranks"""
    whole: Tensor = original(leaf, rows)
    return rows.repeat(1, whole.shape[1] // rows.shape[1])


@around(eva.Inputs, "counted", needs={Feature.EVA})
def eva_of_untrained_tokens(original: Any, self: eva.Inputs, step: Any) -> Any:
    """a start that looks at data looks at trained tokens alone"""
    self.use_label_mask = False
    return original(self, step)


@around(calibration, "initialize_eva", needs={Feature.EVA, Feature.SHORT_BATCH})
def eva_of_another_epoch(
    original: Any, model: Any, name: str, batching: Any, steps: int, step: Callable[[int], Any]
) -> Any:
    """a start that looks at data takes the steps of the run, from the first one"""
    return original(model, name, batching, steps, lambda number: step(number + steps))


@after(eva, "redistributed", needs={Feature.EVA})
def eva_scale_left_alone(config: LoraConfig, *_: Any) -> LoraConfig:
    """a target that gets another rank keeps its scale"""
    return dataclasses.replace(config, alpha_pattern={})


@after(rows, "invoked_tokens", needs={Feature.INVOKED})
def invoked_after_the_first_token(acts: Tensor, *_: Any, **__: Any) -> Tensor:
    """an adapter acts on the first token of its invocation too"""
    before = torch.zeros_like(acts)
    before[:, 1:] = acts[:, :-1]
    return acts & before


@after(rows, "_occurrences", needs={Feature.INVOKED_TWICE})
def invoked_from_the_first_occurrence(found: Tensor, ids: Tensor, *_: Any) -> Tensor:
    """an adapter acts from the last occurrence of its invocation on"""
    return found & (found.cumsum(1) == 1)


@instead_of(rows, "invoked_tokens", needs={Feature.INVOKED})
def invoked_everywhere(ids: Tensor, *_: Any, **__: Any) -> Tensor:
    """tokens before the invocation, and sequences without one, are the base's"""
    return torch.ones_like(ids, dtype=torch.bool)


@around(linear.ActiveRows, "drop", needs={Feature.INVOKED, Feature.LORA_DROPOUT})
def invoked_without_dropout(original: Any, self: linear.ActiveRows, x: Tensor) -> Tensor:
    """where an adapter acts, its input has dropout"""
    return x.masked_fill(~self.acts.unsqueeze(1), 0)


a_drawn_per_rank = around(initialization, "draw_factors", needs={Feature.RANKS})(  # that of rank 0 stays right
    passing("a fresh A has the same bits on every rank and topology", seed=lambda seed: seed + rank())
)
lora_scale_squared = around(ParallelLinear, "add_adapter", needs={Feature.SCALE})(
    passing("the LoRA scale is applied once", scaling=lambda scaling: scaling * scaling)
)
fresh_seed_ignored = around(initialization, "draw_factors", needs={Feature.SEED})(
    passing("a fresh adapter is determined by its seed", seed=0)
)
invoked_by_the_first_token_alone = around(rows, "_occurrences", needs={Feature.INVOKED})(
    passing("all tokens of the invocation are needed", invocation=lambda tokens: tokens[:1])
)
invoked_by_the_row_not_the_sequence = around(rows, "invoked_tokens", needs={Feature.INVOKED, Feature.PACKING})(
    passing("each sequence of a packed row is invoked by its own tokens", positions=None, mask=None)
)
invoked_by_the_neighbours_row = after(rows, "invoked_tokens", needs={Feature.INVOKED, Feature.SEVERAL_ROWS})(
    result("each row is invoked by its own tokens", lambda acts: acts.roll(1, 0))
)
