"""Faults of resumed runs and of several adapters: state lost, exchanged, repeated or shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshlora.adapter.formats import peft_format
from meshlora.layers.tokens import ForwardTokens
from meshlora.run import trained, trainer
from meshlora.run.checkpoint import state as checkpoint
from meshlora.run.checkpoint.resuming import FOLDER
from meshlora.run.trained import TrainedAdapter
from meshlora.run.trainer import Trainer
from meshlora.train import gradsync
from meshlora.verify.faults.fault import after, around, fault, instead_of, passing
from meshlora.verify.features import Feature
from meshlora.wings.experts import module as experts
from meshlora.wings.variants import magnitudes
from meshlora.wings.variants.magnitudes import Magnitudes


@around(peft_format, "read_adapter", needs={Feature.RESUME})
def resumed_from_the_first_adapter(original: Any, model: Any, name: str, planned: Any) -> Any:
    """a run resumes with the adapter of its checkpoint"""
    if planned.folder.parent.name == FOLDER:  # of checkpoints
        planned = replace(planned, folder=planned.folder.parents[1] / "initial")
    return original(model, name, planned)


@instead_of(trained, "restore_optimizer", needs={Feature.RESUME})
def moments_not_restored(*_: Any) -> None:
    """AdamW resumes with the moments of the checkpoint"""


@after(trained, "restore_optimizer", needs={Feature.RESUME})
def moments_exchanged(_: None, model: Any, optimizer: torch.optim.Optimizer, *__: Any) -> None:
    """each moment is restored as the one it was"""
    for state in optimizer.state.values():
        # AdamW takes a root of the second.
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()


@around(checkpoint, "local_part", needs={Feature.RESUME, Feature.TP})
def moments_of_another_rank(original: Any, tensor: Tensor, rule: Any, mesh: Any) -> Any:
    """each rank takes its own part of the moments"""
    own = original(tensor, rule, mesh)
    if rule.split_dim is None:
        return own
    return original(tensor.roll(own.shape[rule.split_dim], rule.split_dim), rule, mesh)


@after(trained, "restore_optimizer", needs={Feature.RESUME})
def bias_correction_begins_again(_: None, model: Any, optimizer: torch.optim.Optimizer, *__: Any) -> None:
    """AdamW resumes its step count"""
    for state in optimizer.state.values():
        state["step"].zero_()


@fault(lambda wrong, _: property(wrong), TrainedAdapter, "start", needs={Feature.RESUME})
def resumed_one_step_late(self: TrainedAdapter) -> int:
    """the first step after a checkpoint is the next one"""
    return self.run.resume.step + 1 if self.run.resume is not None else 0


@around(TrainedAdapter, "update", needs={Feature.RESUME})
def schedule_begins_again(original: Any, self: TrainedAdapter, step: int, **rest: Any) -> Any:
    """the learning rate schedule resumes where it stopped"""
    return original(self, step - self.start, **rest)


@after(TrainedAdapter, "__post_init__", needs={Feature.RESUME})
def order_begins_again(_: None, self: TrainedAdapter) -> None:
    """the next step takes the next sequences"""
    batches, start = self.run.batches, self.start

    class Anew:
        def batch(self, step: int) -> Any:
            return batches.batch(step - start)

    self.batches = Anew()  # type: ignore[assignment]


@after(TrainedAdapter, "share", needs={Feature.RESUME, Feature.DROPOUT})
def masks_begin_again(share: Any, self: TrainedAdapter, *_: Any) -> Any:
    """dropout depends on the step, not on how often a run was stopped"""
    return replace(share, step=share.step - self.start)


@around(gradsync, "_sum_bucket", needs={Feature.ADAPTERS})
def adapters_divided_by_tokens_of_all(original: Any, *of: Any, scales: Tensor) -> Any:
    """each adapter's gradients are divided by the number of its own tokens"""
    return original(*of, scales=(1 / (1 / scales).sum()).expand_as(scales))  # a scale is one over a count


@around(Trainer, "train_step", needs={Feature.ADAPTERS})
def adapters_gradients_kept(original: Any, self: Trainer, adapters: Any) -> Any:
    """a step begins without the gradients of the last one"""

    def kept(self: torch.optim.Optimizer, **_: object) -> None:
        """Keep gradients, as clones without the mark of finished ones, which would be refused."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()

    if len(adapters) == 1:
        return original(self, adapters)
    with mock.patch.object(torch.optim.Optimizer, "zero_grad", kept):
        return original(self, adapters)


@around(ForwardTokens, "of", needs={Feature.ADAPTERS, Feature.LORA_DROPOUT})
def adapters_dropped_as_the_first(original: Any, self: ForwardTokens, shares: Any, adapters: Any) -> Any:
    """each adapter's dropout is drawn by its own seed"""
    mixed = [replace(share, seed=1) for share in shares] if len(adapters) > 1 else shares
    return original(self, mixed, adapters)


@after(experts, "owners", needs={Feature.ADAPTERS, Feature.EXPERT_TARGET})
def adapters_exchanged_at_experts(found: Tensor, parts: Any, names: Any) -> Tensor:
    """at an expert each row gets the product of its own adapter"""
    return (found + 1) % len(names)


@around(magnitudes, "weight_norm", needs={Feature.ADAPTERS, Feature.DORA}, within=(Magnitudes, "ratio"))
def adapters_scaled_by_the_norm_of_the_first(original: Any, leaf: Any, _: str) -> Any:
    """each adapter's rows are scaled by magnitudes over norms of its own"""
    return original(leaf, next(iter(leaf.scaling)))


adapters_clipped_as_the_next = around(trainer, "clip_gradients_on_device", needs={Feature.ADAPTERS})(
    passing("each adapter is clipped to a norm of its own", max_norms=lambda norms: [*norms[1:], *norms[:1]])
)
