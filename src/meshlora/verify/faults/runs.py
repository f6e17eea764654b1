"""Mutations of runs: options that are not heeded, and faults in what is between the steps: evaluation, order, state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from meshlora.adapter import attach
from meshlora.comm.groups import Mesh
from meshlora.data import sampler
from meshlora.data.sampler import GlobalBatches
from meshlora.layers import tokens
from meshlora.layers.embedding import ParallelEmbedding
from meshlora.layers.tokens import ForwardTokens, Mask
from meshlora.train import batches, gradsync, objectives, trained, trainer
from meshlora.train.batches import Batching
from meshlora.train.gradsync import Adapters
from meshlora.train.trained import TrainedAdapter
from meshlora.train.trainer import Trainer
from meshlora.verify.faults import wrong_code
from meshlora.verify.faults.fault import Change, Mutation, in_call, instead, mutation, then

# --- evaluation


def _evaluated(change: Callable[[np.ndarray, int], np.ndarray]) -> Change:
    """What is evaluated, changed by `change(indices, sequences that all ranks take at once)`."""

    def of_indices(original: Any) -> Any:
        def of(self: Batching, data: Any, indices: np.ndarray) -> Any:
            return original(self, data, change(indices, self.micro_batch_size * self.mesh.dp.size))

        return of

    return TrainedAdapter, "evaluate", in_call(Batching, "batches", of_indices)


def _smoothed(original: Any) -> Any:
    def evaluate(self: TrainedAdapter, data: Any) -> Any:
        own, loss = vars(self.objective)["label_smoothing"], objectives.language_model_loss

        def smoothed(*args: Any, label_smoothing: float, **rest: Any) -> Tensor:
            return loss(*args, label_smoothing=own, **rest)

        with mock.patch.object(objectives, "language_model_loss", smoothed):
            return original(self, data)

    return evaluate


def _left_in_evaluation(found: Any, model: Any, *_: Any) -> Any:
    model.eval()
    return found


# --- options


def _groups_with(change: Callable[[Any], Any]) -> Change:
    return trained, "parameter_groups", lambda original: lambda model, options: original(model, change(options))


def _rounded_rate(mask: Mask, *_: Any) -> Mask:
    return dataclasses.replace(mask, p=round(mask.p, 1))


# --- steps


def _state_forgotten(original: Any) -> Any:
    def update(self: TrainedAdapter, step: int, **rest: Any) -> Any:
        self.optimizer.state.clear()
        return original(self, step, **rest)

    return update


def _flipped_at_last(original: Any) -> Any:
    def flipped(clip: Any) -> Any:
        def call(mesh: Mesh, adapters: Adapters, limits: Sequence[float | None]) -> Any:
            for factors in adapters:
                gradient = factors[-1].parameter.grad
                assert gradient is not None
                gradient.neg_()
            return clip(mesh, adapters, limits)

        return call

    flips = in_call(trainer, "clip_gradients_on_device", flipped)(original)

    def train_step(self: Trainer, adapters: list[TrainedAdapter]) -> Any:
        is_last = 0 < adapters[0].done == adapters[0].run.steps - 1
        return (flips if is_last else original)(self, adapters)

    return train_step


def _one_step_further(found: Any, self: TrainedAdapter, *_: Any, **__: Any) -> Any:
    for state in self.optimizer.state.values():
        state["step"] += 1
    return found


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


def _filled_up(found: np.ndarray, self: GlobalBatches, step: int) -> np.ndarray:
    return np.concatenate([found, self.batch(0)[: self.global_batch_size - len(found)]]) if step else found


# --- the adapter


def _b_drawn(found: dict[str, Tensor], *_: Any, init: bool | str, **__: Any) -> dict[str, Tensor]:
    return {part: t if t.any() else torch.full_like(t, 1e-3) for part, t in found.items()}


def _padding_trained(original: Any) -> Any:
    def lora(self: ParallelEmbedding, *args: Any) -> Tensor:
        with mock.patch.object(self, "padding_idx", None):
            return original(self, *args)

    return lora


OF_RUNS: dict[str, Mutation] = dict(
    [
        mutation(
            "evaluation_remainder_dropped",
            "an evaluation takes what is left after the last round of all ranks",
            "",
            _evaluated(lambda indices, size: indices[: len(indices) // size * size]),
        ),
        mutation(
            "evaluation_filled_up",
            "an evaluation takes no sequence twice",
            "",
            _evaluated(lambda indices, size: np.concatenate([indices, indices[: -len(indices) % size]])),
        ),
        mutation(
            "evaluation_counts_dummies",
            "a rank that has no sequence left adds nothing to an evaluation",
            "dp",
            (TrainedAdapter, "evaluate", in_call(batches, "collate", then(wrong_code.counted_dummy))),
        ),
        mutation(
            "evaluation_smoothed",
            "the evaluated loss is not smoothed",
            "smoothing sft",
            (TrainedAdapter, "evaluate", _smoothed),
        ),
        mutation(
            "evaluation_ends_dropout",
            "after an evaluation training goes on with dropout",
            "dropout steps",
            (trained, "mean_loss", then(_left_in_evaluation)),
        ),
        mutation(
            "sampler_seed_ignored",
            "the order of the sequences is that of the run's seed",
            "seed",
            (sampler, "epoch_order", lambda f: lambda n, *, seed, epoch: f(n, seed=0, epoch=epoch)),
        ),
        mutation(
            "epoch_in_file_order",
            "an epoch takes the sequences in a drawn order",
            "",
            (sampler, "epoch_order", then(lambda order, *_, **__: np.sort(order))),
        ),
        mutation(
            "batch_filled_up",
            "the last batch of an epoch has what is left, and nothing twice",
            "short_batch",
            (GlobalBatches, "batch", then(_filled_up)),
        ),
        mutation(
            "dropout_seed_ignored",
            "masks are those of the run's seed",
            "dropout seed",
            (tokens, "mask_key", lambda f: lambda seed, step, module: f(0, step, module)),
        ),
        mutation(
            "dropout_rate_in_tenths",
            "the dropout rate of an adapter is the configured one",
            "odd_dropout",
            (ForwardTokens, "mask", then(_rounded_rate)),
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
            "gradient_flipped_in_the_last_step",
            "the gradients of every step are those of one process",
            "steps",
            (Trainer, "train_step", _flipped_at_last),
        ),
        mutation(
            "optimizer_state_forgotten",
            "AdamW goes on from the moments of the step before",
            "steps digits",
            (TrainedAdapter, "update", _state_forgotten),
        ),
        mutation(
            "bias_correction_runs_ahead",
            "the bias correction of step n is that of n",
            "steps digits",
            (TrainedAdapter, "update", then(_one_step_further)),
        ),
        mutation("default_eps", "AdamW has the configured eps", "digits", wrong_code.optimizer_with(eps=1e-8)),
        mutation(
            "learning_rate_constant",
            "the learning rate follows its schedule",
            "steps",
            (trained, "learning_rate", instead(lambda step, *, options, steps: options.lr)),
        ),
        mutation(
            "learning_rate_one_step_late",
            "step n has the learning rate of step n",
            "steps",
            (trained, "learning_rate", lambda f: lambda step, **rest: f(max(0, step - 1), **rest)),
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
            "norms_not_decayed",
            "biases and norms decay as configured",
            "trained digits",
            _groups_with(
                lambda options: dataclasses.replace(options, decay_biases_and_norms=not options.decay_biases_and_norms)
            ),
        ),
        mutation(
            "label_smoothing_ignored",
            "the loss is smoothed as configured",
            "smoothing sft",
            (objectives, "language_model_loss", lambda f: lambda *args, label_smoothing, **rest: f(*args, **rest)),
        ),
        mutation(
            "lora_plus_ratio_ignored",
            "with LoRA+ B learns faster than A",
            "lora_plus",
            (trained, "parameter_groups", then(wrong_code.at_one_rate)),
        ),
        mutation(
            "lora_plus_embedding_rate_ignored",
            "with LoRA+ the embedding has a learning rate of its own",
            "lora_plus embedding_target",
            _groups_with(lambda options: dataclasses.replace(options, lora_plus_embedding_lr=options.peak_lr)),
        ),
        mutation(
            "embedding_padding_trained",
            "as in PEFT an adapter on the embedding has no gradient from the padding token",
            "embedding_padding",
            (ParallelEmbedding, "_lora", _padding_trained),
        ),
        mutation(
            "aux_loss_at_default",
            "the load-balancing loss weighs as configured",
            "aux_loss",
            (trainer, "LoadBalancing", lambda f: lambda model, *, coef: f(model, coef=0.001)),
        ),
        mutation(
            "shared_experts_not_summed_over_ep",
            "one adapter for all experts has the gradient of the experts of all ranks",
            "ep shared_experts_adapter",
            (gradsync, "_segments", wrong_code.segments_with(wrong_code.without_axes(lambda axis: axis == "ep"))),
        ),
    ]
)
