"""Faults of optimizer and schedule: ignored options, lost steps and states."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshlora.comm.groups import Mesh
from meshlora.model.inject import parallel_leaves
from meshlora.run import eight_bit, lora_fa, trained, trainer
from meshlora.run import optimizer as optimizers
from meshlora.run.eight_bit import AdamW8bit
from meshlora.run.lora_fa import LoraFA
from meshlora.run.trained import TrainedAdapter
from meshlora.run.trainer import Trainer
from meshlora.train.gradsync import Adapters
from meshlora.verify.faults.fault import after, around, instead_of, passing, result, stating
from meshlora.verify.features import Feature

Groups = list[dict[str, Any]]


def _adamw(invariant: str, **options: Any) -> Any:
    """For `around` of AdamW: with `options` overriding those given."""

    def wrong(original: Any, groups: Groups, **given: Any) -> Any:
        # A group has options of its own, which win.
        return original([{**group, **options} for group in groups], **{**given, **options})

    return stating(invariant, wrong)


weight_decay_skipped = around(torch.optim, "AdamW", needs={Feature.ADAMW, Feature.DIGITS})(
    _adamw("weights decay as configured", weight_decay=0.0)
)
default_betas = around(torch.optim, "AdamW", needs={Feature.ADAMW, Feature.STEPS, Feature.DIGITS})(
    _adamw("AdamW has the configured betas", betas=(0.9, 0.999))
)
default_eps = around(torch.optim, "AdamW", needs={Feature.ADAMW, Feature.DIGITS})(
    _adamw("AdamW has the configured eps", eps=1e-8)
)


@around(trained, "learning_rate", needs={Feature.STEPS})
def warmup_skipped(original: Any, step: int, *, options: Any, steps: int) -> Any:
    """the learning rate falls from the end of the warm-up, not from the start"""
    return original(step, options=replace(options, warmup_steps=0), steps=steps)


@around(Trainer, "train", needs={Feature.STEPS})
def last_step_left_out(original: Any, self: Trainer) -> Any:
    """a run takes as many optimizer steps as configured"""
    with contextlib.ExitStack() as stack:
        for one in self.adapters:
            stack.enter_context(mock.patch.object(one, "run", replace(one.run, steps=one.run.steps - 1)))
        return original(self)


@around(Trainer, "train_step", needs={Feature.STEPS})
def gradient_flipped_in_the_last_step(original: Any, self: Trainer, adapters: list[TrainedAdapter]) -> Any:
    """the gradients of every step are those of one process"""
    clip = trainer.clip_gradients_on_device

    def flipped(mesh: Mesh, adapters: Adapters, limits: Sequence[float | None]) -> Any:
        for factors in adapters:
            gradient = factors[-1].parameter.grad
            assert gradient is not None
            gradient.neg_()
        return clip(mesh, adapters, limits)

    is_last = 0 < adapters[0].done == adapters[0].run.steps - 1  # and not the only one
    with mock.patch.object(trainer, "clip_gradients_on_device", flipped if is_last else clip):
        return original(self, adapters)


@around(TrainedAdapter, "update", needs={Feature.STEPS, Feature.DIGITS})
def optimizer_state_forgotten(original: Any, self: TrainedAdapter, step: int, **rest: Any) -> Any:
    """AdamW continues from the moments of the previous step"""
    self.optimizer.state.clear()  # AdamW makes zeros of what it does not find
    return original(self, step, **rest)


@after(TrainedAdapter, "update", needs={Feature.STEPS, Feature.DIGITS})
def bias_correction_runs_ahead(found: Any, self: TrainedAdapter, *_: Any, **__: Any) -> Any:
    """the bias correction of step n is that of n"""
    for state in self.optimizer.state.values():
        state["step"] += 1
    return found


@around(trained, "learning_rate", needs={Feature.STEPS, Feature.OTHER_SCHEDULE})
def schedule_taken_for_linear(original: Any, step: int, *, options: Any, steps: int) -> Any:
    """the learning rate has the course that is asked for, a line or another"""
    own = {"num_cycles": 1, "power": 1.0, "timescale": 0, "decay_steps": 0, "decay_type": "linear", "cycle": {}}
    return original(step, options=replace(options, schedule="linear", **own), steps=steps)


@around(trained, "learning_rate", needs={Feature.STEPS, Feature.FINAL_RATE})
def schedule_to_zero(original: Any, step: int, *, options: Any, steps: int) -> Any:
    """the learning rate falls to the final rate that is asked for"""
    return original(step, options=replace(options, min_lr=0.0), steps=steps)


@around(trained, "parameter_groups", needs={Feature.TRAINED, Feature.DIGITS})
def norms_not_decayed(original: Any, model: Any, options: Any) -> Any:
    """biases and norms decay as configured"""
    return original(model, replace(options, decay_biases_and_norms=not options.decay_biases_and_norms))


@around(trained, "parameter_groups", needs={Feature.LORA_PLUS, Feature.EMBEDDING_TARGET})
def lora_plus_embedding_rate_ignored(original: Any, model: Any, options: Any) -> Any:
    """with LoRA+ the embedding has a learning rate of its own"""
    return original(model, replace(options, lora_plus_embedding_lr=options.peak_lr))


@instead_of(lora_fa, "full_factor", needs={Feature.LORA_FA, Feature.TP, Feature.ROW_TARGET})
def correction_of_local_a(local: Tensor, *_: Any) -> Tensor:
    """the gradient of B is corrected by A A^T of the whole A, of which a rank may hold some columns"""
    return local


@after(optimizers, "corrections", needs={Feature.LORA_FA, Feature.SCALE})
def correction_without_scale(found: Mapping[Any, Tensor], model: Any, *_: Any) -> Mapping[Any, Tensor]:
    """the corrected gradient is that of the product without its scale"""
    scales = {scale for leaf in parallel_leaves(model).values() for scale in leaf.scaling.values()}
    return {b: correction * max(scales) ** 2 for b, correction in found.items()}


@after(optimizers, "corrections", needs={Feature.LORA_FA})
def correction_left_out(found: Mapping[Any, Tensor], *_: Any) -> Mapping[Any, Tensor]:
    """with a frozen A the gradient of B is corrected"""
    # Gradients are multiplied by it.
    return {b: torch.eye(len(correction), dtype=correction.dtype) for b, correction in found.items()}


@around(LoraFA, "_update", needs={Feature.LORA_FA, Feature.DIGITS})
def decayed_before_the_step(original: Any, self: LoraFA, b: Any, gradient: Tensor, group: Any) -> Any:
    """LoRA-FA decays what it has stepped"""
    b.mul_(1 - group["lr"] * group["weight_decay"])  # as AdamW does
    return original(self, b, gradient, {**group, "weight_decay": 0.0})


@instead_of(eight_bit, "cuts_blocks", needs={Feature.ADAMW_8BIT, Feature.TP, Feature.ROW_TARGET, Feature.STEPS})
def blocks_of_the_part(*_: Any) -> bool:
    """moments in 8 bits have the scales of blocks of the whole factor, of which a rank may hold parts"""
    return False


@after(AdamW8bit, "is_small", needs={Feature.ADAMW_8BIT, Feature.TP, Feature.STEPS})
def small_by_the_part(_: bool, self: AdamW8bit, name: str) -> bool:
    """whether moments have 8 bits depends on the size of the whole factor"""
    (factor,) = (factor for factor in self.factors.values() if factor.name == name)
    return factor.parameter.numel() < self.least


learning_rate_one_step_late = around(trained, "learning_rate", needs={Feature.STEPS})(
    passing("step n has the learning rate of step n", step=lambda step: max(0, step - 1))
)
lora_plus_ratio_ignored = after(trained, "parameter_groups", needs={Feature.LORA_PLUS})(
    result("with LoRA+ B learns faster than A", lambda groups: [{**group, "times_lr": 1.0} for group in groups])
)
learning_rate_constant = instead_of(trained, "learning_rate", needs={Feature.STEPS})(
    stating("the learning rate follows its schedule", lambda step, *, options, steps: options.lr)
)
