"""Faults: what a mutation puts in the place of one function of the product.

Owns: the wrong code of computing, training and saving, on purpose. Each function here takes the original and gives its
replacement, or is the replacement itself.
Does not own: what lies at the wrong place (`verify.faults.misplaced`), which faults there are and what they break
(`verify.faults.registry`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshlora.adapter import plan as adapter_plan
from meshlora.adapter.attach import Factor, adapter_factors, runtime
from meshlora.adapter.formats import peft_format
from meshlora.comm import collectives
from meshlora.comm.groups import Mesh, launcher_place
from meshlora.layers.linear import ParallelHead, ParallelLinear
from meshlora.model import regions
from meshlora.plan.grads import Segment, Side
from meshlora.plan.layout import Split
from meshlora.plan.rules import LinearRule
from meshlora.plan.topology import size_of_copies
from meshlora.train import gradsync
from meshlora.train.gradsync import Adapters
from meshlora.verify.faults.fault import Change, in_call, then

# --- outputs of row-parallel layers


def bias_before_reduction(original: Any) -> Any:
    def leave(self: ParallelLinear, y: Tensor) -> Tensor:
        # The sum over tp then has the bias tp times: tp - 1 times here, once where it belongs.
        return original(self, y if self.bias is None else y + self.bias * (1 - 1 / self.tp.size))

    return leave


# --- gradients at region borders


def reduce_in_each_column_linear(original: Any) -> Any:
    def forward(self: ParallelLinear, x: Tensor) -> Tensor:
        in_region = self.rule.split is Split.COLUMN and not isinstance(self, ParallelHead)
        return original(self, collectives.copy_one_to_each(x, self.tp) if in_region else x)

    return forward


def _unreduced(change: Any) -> Any:
    """A border whose backward leaves each rank its own term."""

    def border(x: Tensor) -> Tensor:
        with (
            mock.patch.object(regions, "copy_one_to_each", lambda x, axis: x),
            mock.patch.object(regions, "gather_each_to_each", collectives.gather_each_to_one),
        ):
            return change(x)

    return border


NO_REDUCTION_AT_ENTRY: Change = (
    regions,
    "map_input",
    lambda original: lambda module, name, change, **rest: original(module, name, _unreduced(change), **rest),
)


def no_reduction_at_head(original: Any) -> Any:
    """The gradient at the end of the last layer stays, on each rank, that of its part of the vocabulary."""

    def install(model: Any, plan: Any, mesh: Any) -> None:
        last = model.get_submodule(plan.layers)[-1] if plan.layers else None
        map_output = regions.map_output

        def map_but_last(module: Any, change: Any) -> None:
            map_output(module, _unreduced(change) if module is last else change)

        with mock.patch.object(regions, "map_output", map_but_last):
            original(model, plan, mesh)

    return install


# --- sums over gradient axes


def without_tp(split: Split, side: Side) -> Change:
    """The gradient of what is on `side` of linears of this split is not summed over tp."""

    def replace(original: Any) -> Any:
        def factor_rule(rule: LinearRule, of_side: Side, *, sp: bool) -> Any:
            found = original(rule, of_side, sp=sp)
            is_it = (split, side) == (rule.split, of_side)
            return dataclasses.replace(found, grad_axes=found.grad_axes - {"tp"}) if is_it else found

        return factor_rule

    return adapter_plan, "factor_rule", replace


def row_magnitude_of_other_kind(original: Any) -> Any:
    """The sum over tp where each rank has all of it, the mean where each rank has a term."""

    def factor_rule(rule: LinearRule, side: Side, *, sp: bool) -> Any:
        found = original(rule, side, sp=sp)
        if rule.split is not Split.ROW or side is not Side.AFTER:
            return found
        return dataclasses.replace(found, grad_axes=found.grad_axes ^ {"tp"}, mean_axes=found.mean_axes ^ {"tp"})

    return factor_rule


def segments_with(change: Callable[[Segment], Segment]) -> Callable[[Any], Any]:
    """What is summed over which axes, changed."""
    return lambda original: lambda factor, mesh: [change(segment) for segment in original(factor, mesh)]


def without_axes(of: Callable[[str], bool]) -> Callable[[Segment], Segment]:
    """A segment whose gradient is not summed over the axes of which `of` is true."""
    return lambda segment: dataclasses.replace(
        segment, grad_axes=frozenset(axis for axis in segment.grad_axes if not of(axis))
    )


_held_once = segments_with(
    lambda s: dataclasses.replace(s, replicas=frozenset(a for a in s.replicas if not size_of_copies(a)))
)
COPIES_COUNTED = in_call(gradsync, "_segments", _held_once)


def output_without_tp(found: Any, rule: Any, side: Side) -> Any:
    return dataclasses.replace(found, grad_axes=found.grad_axes - {"tp"}) if side is Side.OUTPUT else found


def averaged_over_tp(original: Any) -> Any:
    def sum_bucket(grads: Any, axes: frozenset[str], mesh: Any, *, scales: Tensor) -> None:
        original(grads, axes, mesh, scales=scales / (mesh.tp.size if "tp" in axes else 1))

    return sum_bucket


# --- tokens and micro-batches


def scaled_before(scale: Callable[[int, int, int], float]) -> Callable[[Any], Any]:
    """finish_gradients on gradients multiplied by scale(tokens of all ranks, of this rank, dp)."""

    def replace(original: Any) -> Any:
        def finish(mesh: Mesh, adapters: Adapters, num_tokens: Sequence[int]) -> Tensor:
            for factors, own in zip(adapters, num_tokens, strict=True):
                total = int(collectives.all_reduce_sum(torch.tensor([own], device=mesh.device), mesh.data))
                _times(factors, scale(total, max(own, 1), mesh.data.size))
            return original(mesh, adapters, num_tokens)

        return finish

    return replace


def local_count(original: Any) -> Any:
    def finish(mesh: Mesh, adapters: Adapters, num_tokens: Sequence[int]) -> Tensor:
        totals: Tensor = original(mesh, adapters, num_tokens)
        for factors, total, own in zip(adapters, totals, num_tokens, strict=True):
            _times(factors, total.item() / max(own, 1))
        return totals

    return finish


def _times(factors: Sequence[Factor], scale: float) -> None:
    for factor in factors:
        assert factor.parameter.grad is not None
        factor.parameter.grad.mul_(scale)


def mean_times_ten(
    loss: Tensor, model: Any, input_ids: Tensor, attention_mask: Any, labels: Tensor, **_: Any
) -> Tensor:
    """Every micro-batch weighs as if it had ten tokens."""
    return loss * 10 / (labels != -100).sum().clamp(min=1)


def counted_dummy(batch: Any, sequences: Any, **_: Any) -> Any:
    if sequences:
        return batch
    return dataclasses.replace(batch, labels=batch.input_ids.clone(), num_trained_tokens=batch.input_ids.numel())


def labels_lost_at_cuts(batch: Any, sequences: Any, *, token_multiple: int = 1, **_: Any) -> Any:
    """Shifting inside a slice of the tokens leaves its last token without a label."""
    labels = batch.labels.clone()
    labels.view(token_multiple, -1)[:, -1] = -100
    # Padding has no labels to lose, so one is also lost where every slice ends in padding.
    trained = (batch.labels != -100).nonzero()
    if len(trained) and torch.equal(labels, batch.labels):
        labels[tuple(trained[-1])] = -100
    return dataclasses.replace(batch, labels=labels, num_trained_tokens=int((labels != -100).sum()))


def labels_not_shifted(batch: Any, *_: Any, **__: Any) -> Any:
    """A position is asked for its own token; as many labels as before."""
    labels = batch.labels.roll(1, 1)
    return dataclasses.replace(batch, labels=torch.where(labels == -100, labels, batch.input_ids))


def mean_over_sequences(result: tuple[float, int], trainer: Any, data: Any) -> tuple[float, int]:
    return result[0] * result[1] / len(data), result[1]


# --- drawing and scaling


def seed_of_rank(original: Any) -> Any:
    return lambda *args, seed, **rest: original(*args, seed=seed + rank(), **rest)


def other_b(factors: dict[str, Tensor], *_: Any, **__: Any) -> dict[str, Tensor]:
    return {part: t * (1 + 0.01 * rank()) if part.startswith("B") else t for part, t in factors.items()}


def local_fan_in(original: Any) -> Any:
    def attach(model: Any, name: str, planned: Any, full: Any, *rest: Any) -> None:
        plan = runtime(model).plan

        def wider(target: Any) -> dict[str, Tensor]:
            is_row = target.name in plan.linears and plan.linears[target.name].split is Split.ROW
            width = math.sqrt(plan.topology.tp) if is_row else 1.0
            return {part: t * width if part[0] == "A" else t for part, t in full(target).items()}

        original(model, name, planned, wider, *rest)

    return attach


def on_rank_0_only(original: Any) -> Any:
    def attach(model: Any, name: str, planned: Any, full: Any, *rest: Any) -> None:
        def zeros(target: Any) -> dict[str, Tensor]:
            return {part: torch.zeros_like(t) for part, t in full(target).items()}

        original(model, name, planned, full if rank() == 0 else zeros, *rest)

    return attach


def scaling(change: Callable[[float, int], float]) -> Callable[[Any], Any]:
    def replace(original: Any) -> Any:
        def add_adapter(self: ParallelLinear, name: str, factors: Any, *, scaling: float) -> None:
            original(self, name, factors, scaling=change(scaling, self.tp.size))

        return add_adapter

    return replace


def a_without_scale(original: Any) -> Any:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *of_x, da, db = original(ctx, *grads)
        return *of_x, da if da is None else da / ctx.segments[0].scale, db

    return backward


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


def rank() -> int:
    place = launcher_place()
    return place.rank if place else 0


# --- sequence parallelism


def next_slice(original: Any) -> Any:
    return lambda x, axis: original(x, dataclasses.replace(axis, rank=(axis.rank + 1) % axis.size))


def blocks_reversed(y: Tensor, x: Tensor, axis: Any) -> Tensor:
    return y.unflatten(0, (axis.size, -1)).flip(0).flatten(0, 1)


def blind_whole_regions(original: Any) -> Any:
    """The block gets its rank's tokens, and zeros in the place of all others."""

    def install(module: Any, of: Any, cut: regions.TokenCut, *, sp: bool, riders: Any) -> None:
        if of.is_split:
            original(module, of, cut, sp=sp, riders=riders)
            return

        def own_tokens(x: Tensor) -> Tensor:
            whole = cut.whole(x, terms=False)
            mine = torch.zeros(whole.shape[0] * whole.shape[1], 1, dtype=x.dtype, device=x.device)
            mine.tensor_split(cut.tp.size)[cut.tp.rank].fill_(1)
            return whole * mine.view(*whole.shape[:2], 1)

        regions.map_input(module, of.name, own_tokens)
        regions.map_output(module, cut.cut)

    return install


# --- files


def in_file(change: Callable[[Tensor, int, int], Tensor], *, split: bool) -> Change:
    """change(full tensor, dim, tp) on the factors that are split over tp, or on those that are whole."""

    def gathered(full: dict[str, Tensor], model: Any, adapter: str, **_: Any) -> dict[str, Tensor]:
        rules = {factor.name: factor.rule.split_dim for factor in adapter_factors(model, adapter)}
        tp = runtime(model).mesh.tp.size
        return {
            name: change(t, rules[name] or 0, tp) if (rules[name] is not None) == split else t
            for name, t in full.items()
        }

    return peft_format, "gather_adapter", then(gathered)


def first_shard_only(full: Tensor, dim: int, tp: int) -> Tensor:
    shards = full.tensor_split(tp, dim)
    return torch.cat([shards[0], *(torch.zeros_like(shard) for shard in shards[1:])], dim)


def rounded_in_file(original: Any) -> Any:
    """Half as many bytes: float64 as float32, float32 as bfloat16."""
    half = {torch.float64: torch.float32, torch.float32: torch.bfloat16}

    def save(tensors: dict[str, Tensor], path: Any, **options: Any) -> None:
        original({name: t.to(half.get(t.dtype, t.dtype)) for name, t in tensors.items()}, path, **options)

    return save


def extra_entry(full: dict[str, Tensor], *_: Any, **__: Any) -> dict[str, Tensor]:
    if not full:  # not the rank that writes
        return full
    name = min(name for name in full if ".lora_" in name)
    return full | {name.replace(".lora_", ".old_lora_"): full[name].clone()}


def one_target_less(config: Any, *_: Any, **__: Any) -> Any:
    return dataclasses.replace(config, target_modules=set(sorted(config.target_modules)[1:]))


# --- optimizer steps


def optimizer_with(**options: Any) -> Change:
    def replace(original: Any) -> Any:
        def adamw(groups: list[dict[str, Any]], **given: Any) -> Any:
            return original([{**group, **options} for group in groups], **{**given, **options})

        return adamw

    return torch.optim, "AdamW", replace


def at_one_rate(groups: list[dict[str, Any]], *_: Any) -> list[dict[str, Any]]:
    return [{**group, "times_lr": 1.0} for group in groups]


def replicas_counted(squares: Tensor, factors: Sequence[Any], mesh: Any) -> Tensor:
    whole = [f.parameter.grad for f in factors if "tp" in f.rule.replicas and f.parameter.grad is not None]
    once = sum(grad.double().square().sum() for grad in whole) / mesh.data.size
    return squares + once * (1 - 1 / mesh.tp.size)


def clip_first(original: Any) -> Any:
    def finish(mesh: Mesh, adapters: Adapters, num_tokens: Sequence[int]) -> Tensor:
        for factors, own in zip(adapters, num_tokens, strict=True):
            torch.nn.utils.clip_grad_norm_([factor.parameter for factor in factors], 1e-3 * max(own, 1))
        return original(mesh, adapters, num_tokens)

    return finish
