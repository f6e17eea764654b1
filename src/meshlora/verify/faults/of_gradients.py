"""Faults of gradients: axes of their sums, token counts, clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter import plan as adapter_plan
from meshlora.adapter.attach import Factor, active_factors
from meshlora.comm import collectives
from meshlora.comm.groups import Mesh
from meshlora.layers.products import LoraLinearFunction
from meshlora.plan.grads import GradPart, Side
from meshlora.plan.layout import Split
from meshlora.plan.rules import Domain, LinearRule
from meshlora.run import objectives, trainer
from meshlora.run.trainer import Trainer
from meshlora.train import gradsync
from meshlora.train.gradsync import Adapters
from meshlora.verify.faults.fault import after, around, instead_of, not_summed, passing, without_axis
from meshlora.verify.features import Feature
from meshlora.wings.kernels.shared_input import ShareFunction
from meshlora_ground.topology import size_of_copies

FINISH = (trainer, "finish_gradients_on_device")
CLIP = (trainer, "clip_gradients_on_device")
Limits = Sequence[float | None]


def _times(factors: Sequence[Factor], scale: float) -> None:
    for factor in factors:
        assert factor.parameter.grad is not None
        factor.parameter.grad.mul_(scale)


@after(adapter_plan, "factor_rule", needs={Feature.TP, Feature.COLUMN_TARGET})
def column_a_not_summed(found: Any, rule: LinearRule, side: Side, *, sp: bool) -> Any:
    """the gradient of A of a column-parallel linear is summed over tp"""
    if (rule.split, side) != (Split.COLUMN, Side.INPUT):
        return found
    return without_axis(found, "tp")


@after(adapter_plan, "factor_rule", needs={Feature.TP, Feature.ROW_TARGET})
def row_b_not_summed(found: Any, rule: LinearRule, side: Side, *, sp: bool) -> Any:
    """the gradient of B of a row-parallel linear is summed over tp"""
    if (rule.split, side) != (Split.ROW, Side.OUTPUT):
        return found
    return without_axis(found, "tp")


@around(gradsync, "_sum_bucket", needs={Feature.TP})
def factor_gradients_averaged(original: Any, grads: Any, axes: frozenset[str], mesh: Mesh, *, scales: Tensor) -> None:
    """gradients of factors are summed over tp, not averaged"""
    if "tp" in axes:
        scales = scales / mesh.tp.size
    original(grads, axes, mesh, scales=scales)


def _joined_without_scale(backward: Any) -> Any:
    """Of linears that share their input, whose A have their gradients together."""

    def without(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = list(backward(ctx, *grads))
        for place, da in enumerate(found[3:], start=3):  # the first three are of x
            if da is not None:
                found[place] = da / ctx.joined.scale
        return tuple(found)

    return without


@after(
    LoraLinearFunction, "backward", needs={Feature.SCALE}, also=((ShareFunction, "backward", _joined_without_scale),)
)
def a_gradient_without_scale(found: Any, ctx: Any, *_: Tensor) -> tuple[Any, ...]:
    """the gradients of both factors have the LoRA scale"""
    *of_x, da, db = found
    if da is not None:
        da = da / ctx.segments[0].scale
    return *of_x, da, db


dp_reduction_skipped = after(gradsync, "_parts", needs={Feature.DP})(
    not_summed("dp", "gradients of factors are summed over dp")
)


@around(*FINISH, needs={Feature.DATA})
def dp_mean_of_means(original: Any, mesh: Mesh, adapters: Adapters, num_tokens: Sequence[int]) -> Any:
    """every trained token weighs the same, on whichever dp rank it is"""
    for factors, own in zip(adapters, num_tokens, strict=True):
        # Finishing divides by it.
        total = int(collectives.all_reduce_sum(torch.tensor([own], device=mesh.device), mesh.data))
        _times(factors, total / (mesh.data.size * max(own, 1)))
    return original(mesh, adapters, num_tokens)


@after(*FINISH, needs={Feature.DATA})
def local_token_count(totals: Tensor, mesh: Mesh, adapters: Adapters, num_tokens: Sequence[int]) -> Tensor:
    """gradients are divided by the number of trained tokens of all ranks"""
    for factors, total, own in zip(adapters, totals, num_tokens, strict=True):
        _times(factors, total.item() / max(own, 1))
    return totals


@after(objectives, "language_model_losses", needs={Feature.SFT})
def micro_batch_means(losses: Sequence[Tensor], model: Any, batch: Any, own: Any, **_: Any) -> list[Tensor]:
    """the loss is a sum over tokens: micro-batches of unequal length weigh unequally"""
    changed = []
    for loss, (_, rows) in zip(losses, own, strict=True):
        number = (rows.labels != -100).sum().clamp(min=1)
        changed.append(loss * 10 / number)  # each micro-batch weighs as if it had ten tokens
    return changed


@after(gradsync, "_sum_of_squares", needs={Feature.TP})
def clip_norm_counts_replicas(squares: Tensor, factors: Sequence[Any], mesh: Any) -> Tensor:
    """every logical element counts once in the gradient norm"""
    whole = [f.parameter.grad for f in factors if "tp" in f.rule.replicas and f.parameter.grad is not None]
    once = sum(grad.double().square().sum() for grad in whole) / mesh.data.size
    return squares + once * (1 - 1 / mesh.tp.size)  # squares are summed over tp after this


@around(*FINISH, needs={Feature.RANKS})
def clip_before_reduction(original: Any, mesh: Mesh, adapters: Adapters, num_tokens: Sequence[int]) -> Any:
    """gradients are clipped after they are summed over all ranks"""
    for factors, own in zip(adapters, num_tokens, strict=True):
        torch.nn.utils.clip_grad_norm_([factor.parameter for factor in factors], 1e-3 * max(own, 1))
    return original(mesh, adapters, num_tokens)


@around(adapter_plan, "whole_rule", needs={Feature.SP, Feature.TRAINED})
def trained_norm_not_summed(original: Any, domain: Domain, *, sp: bool) -> Any:
    """the gradient of a trained norm is summed over the ranks that see different tokens or terms"""
    return original(Domain.EQUAL, sp=sp)  # which needs no sum


@after(gradsync, "_parts", needs={Feature.KV_REPLICAS, Feature.KV_TARGET})
def kv_replicas_not_summed(found: list[GradPart], *_: Any) -> list[GradPart]:
    """the gradient of rows that several tp ranks hold is summed over them"""
    changed = []
    for part in found:
        copies = {axis for axis in part.grad_axes if "/" in axis}  # named as a part of tp
        changed.append(dataclasses.replace(part, grad_axes=part.grad_axes - copies))
    return changed


@after(gradsync, "_parts", needs={Feature.KV_REPLICAS, Feature.KV_TARGET}, within=(gradsync, "_sum_of_squares"))
def kv_replicas_counted_in_norm(found: list[GradPart], *_: Any) -> list[GradPart]:
    """rows that several tp ranks hold count once in the gradient norm"""
    changed = []
    for part in found:
        copies = {axis for axis in part.replicas if size_of_copies(axis)}
        changed.append(dataclasses.replace(part, replicas=part.replicas - copies))
    return changed


@instead_of(trainer, "count", needs={Feature.SFT})
def prompts_and_padding_counted(objective: Any, batch: Any) -> int:
    """gradients are divided by the number of tokens that are trained"""
    return 0 if batch.is_dummy else batch.input_ids.numel()


@after(*FINISH, needs={Feature.DATA})
def tokens_of_one_rank_reported(totals: Tensor, mesh: Mesh, adapters: Adapters, num_tokens: Sequence[int]) -> Tensor:
    """a step reports the trained tokens of all ranks"""
    return torch.tensor(num_tokens, device=totals.device)


@around(*CLIP)
def clipped_factor_by_factor(original: Any, mesh: Mesh, adapters: Adapters, limits: Limits) -> Any:
    """all gradients are scaled by one factor, from their global norm"""
    norms = original(mesh, adapters, [None] * len(limits))
    for factors, limit in zip(adapters, limits, strict=True):
        for factor in factors:
            torch.nn.utils.clip_grad_norm_(factor.parameter, limit or 0.0)
    return norms


@after(*CLIP, needs={Feature.STEPS})
def clipping_scales_up(norms: Tensor, mesh: Mesh, adapters: Adapters, limits: Limits) -> Tensor:
    """gradients whose norm is below the limit stay as they are"""
    for factors, limit, norm in zip(adapters, limits, norms, strict=True):
        for factor in factors:
            assert factor.parameter.grad is not None
            factor.parameter.grad.mul_(((limit or 0.0) / norm).clamp(min=1.0))
    return norms


@around(*CLIP)
def norm_after_clipping_reported(original: Any, mesh: Mesh, adapters: Adapters, limits: Limits) -> Any:
    """a step reports the norm before clipping"""
    original(mesh, adapters, limits)
    return original(mesh, adapters, [None] * len(limits))


@around(Trainer, "_backward", needs={Feature.SEVERAL_MICRO_BATCHES})
def earlier_micro_batches_dropped(original: Any, self: Trainer, *args: Any, **rest: Any) -> Any:
    """the gradient of a step is the sum over its micro-batches"""
    for one in self.adapters:
        one.optimizer.zero_grad(set_to_none=True)
    return original(self, *args, **rest)


@around(Trainer, "_backward", needs={Feature.FOUR_MICRO_BATCHES})
def fourth_micro_batch_dropped(original: Any, self: Trainer, number: int, losses: list[Tensor]) -> None:
    """the gradient of a step is the sum over all of its micro-batches"""
    if number < 3:  # from 0
        original(self, number, losses)
        return
    factors = active_factors(self.model)
    before = [None if f.parameter.grad is None else f.parameter.grad.clone() for f in factors]
    original(self, number, losses)
    for factor, gradient in zip(factors, before, strict=True):
        factor.parameter.grad = gradient


clipping_skipped = around(*CLIP)(
    passing("gradients are scaled down to the largest norm", max_norms=lambda norms: [None] * len(norms))
)
default_max_grad_norm = around(*CLIP)(  # as in run files
    passing("gradients are clipped at the configured norm", max_norms=lambda norms: [1.0] * len(norms))
)
