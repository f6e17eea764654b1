"""Optimizer and schedule: options that are not heeded, steps and states that are lost."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from meshlora.comm.groups import Mesh
from meshlora.train import trained, trainer
from meshlora.train.gradsync import Adapters
from meshlora.train.trained import TrainedAdapter
from meshlora.train.trainer import Trainer
from meshlora.verify.faults.fault import Change, by_name, in_call, instead, mutation, then


def _groups_with(change: Callable[[Any], Any]) -> Change:
    return trained, "parameter_groups", lambda original: lambda model, options: original(model, change(options))


def _without_last_step(original: Any) -> Any:
    def train(self: Any) -> None:
        with contextlib.ExitStack() as stack:
            for one in self.adapters:
                stack.enter_context(
                    mock.patch.object(one, "run", dataclasses.replace(one.run, steps=one.run.steps - 1))
                )
            original(self)

    return train


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


def optimizer_with(**options: Any) -> Change:
    def replace(original: Any) -> Any:
        def adamw(groups: list[dict[str, Any]], **given: Any) -> Any:
            return original([{**group, **options} for group in groups], **{**given, **options})

        return adamw

    return torch.optim, "AdamW", replace


def at_one_rate(groups: list[dict[str, Any]], *_: Any) -> list[dict[str, Any]]:
    return [{**group, "times_lr": 1.0} for group in groups]


OF_OPTIMIZER = by_name(
    mutation(
        "warmup_skipped",
        "the learning rate falls from the end of the warm-up, not from the start",
        "steps",
        (
            trained,
            "learning_rate",
            lambda f: lambda step, *, options, steps: f(step, options=replace(options, warmup_steps=0), steps=steps),
        ),
    ),
    mutation("weight_decay_skipped", "weights decay as configured", "digits", optimizer_with(weight_decay=0.0)),
    mutation(
        "default_betas",
        "AdamW has the configured betas",
        "steps digits",
        optimizer_with(betas=(0.9, 0.999)),
    ),
    mutation(
        "last_step_left_out",
        "a run takes as many optimizer steps as configured",
        "steps",
        (Trainer, "train", _without_last_step),
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
    mutation("default_eps", "AdamW has the configured eps", "digits", optimizer_with(eps=1e-8)),
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
        "norms_not_decayed",
        "biases and norms decay as configured",
        "trained digits",
        _groups_with(
            lambda options: dataclasses.replace(options, decay_biases_and_norms=not options.decay_biases_and_norms)
        ),
    ),
    mutation(
        "lora_plus_ratio_ignored",
        "with LoRA+ B learns faster than A",
        "lora_plus",
        (trained, "parameter_groups", then(at_one_rate)),
    ),
    mutation(
        "lora_plus_embedding_rate_ignored",
        "with LoRA+ the embedding has a learning rate of its own",
        "lora_plus embedding_target",
        _groups_with(lambda options: dataclasses.replace(options, lora_plus_embedding_lr=options.peak_lr)),
    ),
)
