"""Gradients: over which ranks they are summed, by which number of tokens they are divided, how they are clipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter import plan as adapter_plan
from meshlora.adapter.attach import Factor, active_factors
from meshlora.comm import collectives
from meshlora.comm.groups import Mesh
from meshlora.layers.products import LoraLinearFunction
from meshlora.plan.grads import Side
from meshlora.plan.layout import Split
from meshlora.plan.rules import Domain, LinearRule
from meshlora.plan.topology import size_of_copies
from meshlora.train import batches, gradsync, objectives, trainer
from meshlora.train.gradsync import Adapters
from meshlora.train.trainer import Trainer
from meshlora.verify.faults import wrong_code
from meshlora.verify.faults.fault import Change, by_name, in_call, instead, mutation, then


@torch.no_grad()
def _each_by_itself(original: Any) -> Any:
    def clip(mesh: Mesh, adapters: Adapters, limits: Sequence[float | None]) -> Tensor:
        norms: Tensor = original(mesh, adapters, [None] * len(limits))
        for factors, limit in zip(adapters, limits, strict=True):
            for factor in factors:
                torch.nn.utils.clip_grad_norm_(factor.parameter, limit or 0.0)
        return norms

    return clip


@torch.no_grad()
def _scaled_to_the_limit(original: Any) -> Any:
    def clip(mesh: Mesh, adapters: Adapters, limits: Sequence[float | None]) -> Tensor:
        norms: Tensor = original(mesh, adapters, limits)
        for factors, limit, norm in zip(adapters, limits, norms, strict=True):
            for factor in factors:
                assert factor.parameter.grad is not None
                factor.parameter.grad.mul_(((limit or 0.0) / norm).clamp(min=1.0))
        return norms

    return clip


def _norm_afterwards(original: Any) -> Any:
    def clip(mesh: Mesh, adapters: Adapters, limits: Sequence[float | None]) -> Tensor:
        original(mesh, adapters, limits)
        after: Tensor = original(mesh, adapters, [None] * len(limits))
        return after

    return clip


def _all_tokens(objective: Any, batch: Any) -> int:
    return 0 if batch.is_dummy else batch.input_ids.numel()


def _before_each(original: Any) -> Any:
    def backward(self: Trainer, number: int, batch: Any, *, is_only: bool) -> Any:
        for one in self.adapters:
            one.optimizer.zero_grad(set_to_none=True)
        return original(self, number, batch, is_only=is_only)

    return backward


def _fourth_dropped(original: Any) -> Any:
    def backward(self: Trainer, number: int, batch: Any, *, is_only: bool) -> Any:
        if number < 3:
            return original(self, number, batch, is_only=is_only)
        factors = active_factors(self.model)
        before = [None if f.parameter.grad is None else f.parameter.grad.clone() for f in factors]
        found = original(self, number, batch, is_only=is_only)
        for factor, gradient in zip(factors, before, strict=True):
            factor.parameter.grad = gradient
        return found

    return backward


def without_tp(split: Split, side: Side) -> Change:
    """The gradient of what is on `side` of linears of this split is not summed over tp."""

    def replace(original: Any) -> Any:
        def factor_rule(rule: LinearRule, of_side: Side, *, sp: bool) -> Any:
            found = original(rule, of_side, sp=sp)
            is_it = (split, side) == (rule.split, of_side)
            return dataclasses.replace(found, grad_axes=found.grad_axes - {"tp"}) if is_it else found

        return factor_rule

    return adapter_plan, "factor_rule", replace


_held_once = wrong_code.segments_with(
    lambda s: dataclasses.replace(s, replicas=frozenset(a for a in s.replicas if not size_of_copies(a)))
)


COPIES_COUNTED = in_call(gradsync, "_segments", _held_once)


def averaged_over_tp(original: Any) -> Any:
    def sum_bucket(grads: Any, axes: frozenset[str], mesh: Any, *, scales: Tensor) -> None:
        original(grads, axes, mesh, scales=scales / (mesh.tp.size if "tp" in axes else 1))

    return sum_bucket


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


def a_without_scale(original: Any) -> Any:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *of_x, da, db = original(ctx, *grads)
        return *of_x, da if da is None else da / ctx.segments[0].scale, db

    return backward


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


OF_GRADIENTS = by_name(
    mutation(
        "column_a_not_summed",
        "the gradient of A of a column-parallel linear is summed over tp",
        "tp column_target",
        without_tp(Split.COLUMN, Side.INPUT),
    ),
    mutation(
        "row_b_not_summed",
        "the gradient of B of a row-parallel linear is summed over tp",
        "tp row_target",
        without_tp(Split.ROW, Side.OUTPUT),
    ),
    mutation(
        "factor_gradients_averaged",
        "gradients of factors are summed over tp, not averaged",
        "tp",
        (gradsync, "_sum_bucket", averaged_over_tp),
    ),
    mutation(
        "a_gradient_without_scale",
        "the gradients of both factors have the LoRA scale",
        "scale",
        (LoraLinearFunction, "backward", a_without_scale),
    ),
    mutation(
        "dp_reduction_skipped",
        "gradients of factors are summed over dp",
        "dp",
        (gradsync, "_segments", wrong_code.segments_with(wrong_code.without_axes(lambda axis: axis == "dp"))),
    ),
    mutation(
        "dp_mean_of_means",
        "every trained token weighs the same, on whichever dp rank it is",
        "dp",
        (
            trainer,
            "finish_gradients_on_device",
            scaled_before(lambda total, own, dp: total / (dp * own)),
        ),
    ),
    mutation(
        "local_token_count",
        "gradients are divided by the number of trained tokens of all ranks",
        "dp",
        (trainer, "finish_gradients_on_device", local_count),
    ),
    mutation(
        "micro_batch_means",
        "the loss is a sum over tokens: micro-batches of unequal length weigh unequally",
        "sft",
        (objectives, "language_model_loss", then(mean_times_ten)),
    ),
    mutation(
        "dummy_micro_batch_counted",
        "a dummy micro-batch adds neither loss nor tokens",
        "dp",
        (batches, "collate", then(wrong_code.counted_dummy)),
    ),
    mutation(
        "clip_norm_counts_replicas",
        "every logical element counts once in the gradient norm",
        "tp",
        (gradsync, "_sum_of_squares", then(replicas_counted)),
    ),
    mutation(
        "clip_before_reduction",
        "gradients are clipped after they are summed over all ranks",
        "ranks",
        (trainer, "finish_gradients_on_device", clip_first),
    ),
    mutation(
        "clipping_skipped",
        "gradients are scaled down to the largest norm",
        "",
        (
            trainer,
            "clip_gradients_on_device",
            lambda f: lambda mesh, adapters, limits: f(mesh, adapters, [None] * len(limits)),
        ),
    ),
    mutation(
        "trained_norm_not_summed",
        "the gradient of a norm that is trained is summed over the ranks that see different tokens or terms",
        "sp trained",
        (adapter_plan, "whole_rule", lambda f: lambda domain, *, sp: f(Domain.EQUAL, sp=sp)),
    ),
    mutation(
        "kv_replicas_not_summed",
        "the gradient of rows that several tp ranks hold is summed over them",
        "kv_replicas kv_target",
        (gradsync, "_segments", wrong_code.segments_with(wrong_code.without_axes(lambda axis: "/" in axis))),
    ),
    mutation(
        "kv_replicas_counted_in_norm",
        "rows that several tp ranks hold count once in the gradient norm",
        "kv_replicas kv_target",
        (gradsync, "_sum_of_squares", COPIES_COUNTED),
    ),
    mutation(
        "prompts_and_padding_counted",
        "gradients are divided by the number of tokens that are trained",
        "sft",
        (trainer, "count", instead(_all_tokens)),
    ),
    mutation(
        "tokens_of_one_rank_reported",
        "a step reports the trained tokens of all ranks",
        "dp",
        (
            trainer,
            "finish_gradients_on_device",
            then(lambda totals, mesh, adapters, own: torch.tensor(own, device=totals.device)),
        ),
    ),
    mutation(
        "default_max_grad_norm",
        "gradients are clipped at the configured norm",
        "",
        (
            trainer,
            "clip_gradients_on_device",
            lambda f: lambda mesh, adapters, limits: f(mesh, adapters, [1.0] * len(limits)),
        ),
    ),
    mutation(
        "clipped_factor_by_factor",
        "all gradients are scaled by one number, of their global norm",
        "",
        (trainer, "clip_gradients_on_device", _each_by_itself),
    ),
    mutation(
        "clipping_scales_up",
        "gradients whose norm is below the limit stay as they are",
        "steps",
        (trainer, "clip_gradients_on_device", _scaled_to_the_limit),
    ),
    mutation(
        "norm_after_clipping_reported",
        "a step reports the norm before clipping",
        "",
        (trainer, "clip_gradients_on_device", _norm_afterwards),
    ),
    mutation(
        "earlier_micro_batches_dropped",
        "the gradient of a step is the sum over its micro-batches",
        "",
        (Trainer, "_backward", _before_each),
    ),
    mutation(
        "fourth_micro_batch_dropped",
        "the gradient of a step is the sum over all of its micro-batches",
        "four_micro_batches",
        (Trainer, "_backward", _fourth_dropped),
    ),
)
