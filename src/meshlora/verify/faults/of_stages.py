"""Faults of stages of layers: what is sent between them, what is summed over them, what is saved of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter import attach
from meshlora.adapter.attach import Factor
from meshlora.comm import messages
from meshlora.comm.groups import Mesh
from meshlora.plan.rules import ModelPlan
from meshlora.run import step_sums
from meshlora.run.trainer import Trainer
from meshlora.train.gradsync import Adapters
from meshlora.verify.faults.fault import after, around, passing, result
from meshlora.verify.faults.of_gradients import CLIP
from meshlora.verify.faults.of_images import of_vision
from meshlora.verify.features import Feature
from meshlora.wings.stages import hold as stages
from meshlora_ground.further_inputs import TOKEN_TYPES

BACK = (messages._TakeOver, "backward")


@around(*BACK, needs={Feature.PP})
def stage_gradient_not_sent(original: Any, ctx: Any, gradient: Tensor) -> Any:
    """a stage sends the gradient of its input to the stage before"""
    return original(ctx, torch.zeros_like(gradient))  # the other stage waits for it


@around(*BACK, needs={Feature.PP})
def stage_gradient_halved(original: Any, ctx: Any, gradient: Tensor) -> Any:
    """the gradient of a stage's input is sent as it is, not divided by the number of micro-batches"""
    return original(ctx, gradient / 2)


@around(messages, "send", needs={Feature.PP}, within=BACK)
def stage_gradient_of_first_micro_batch_alone(original: Any, gradient: Tensor, channel: Any) -> None:
    """the gradients of all micro-batches are sent to the stage before"""
    number = channel.outbox.number = getattr(channel.outbox, "number", 0) + 1
    # Sent all the same: the other stage waits.
    original(gradient if number == 1 else torch.zeros_like(gradient), channel)


@around(*CLIP, needs={Feature.PP})
def norm_of_one_stage(original: Any, mesh: Mesh, adapters: Adapters, limits: Sequence[float | None]) -> Any:
    """the norm of the gradient is that of all stages"""
    other = copy.copy(mesh)  # whose group of all ranks is that of one stage
    other._axes = {**mesh._axes, frozenset(mesh.topology.sizes): mesh.stage}
    return original(other, adapters, limits)


@around(step_sums.StepSums, "add", needs={Feature.PP})
def loss_counted_on_every_stage(
    original: Any, self: Any, number: int, batch: Any, count: int, loss: Any, sums: Any
) -> None:
    """a step's loss is that of the last stage"""
    share = loss if self._mesh.is_counted else torch.ones_like(loss)
    original(self, number, batch, count, share, sums)


@around(attach, "broadcast_of", needs={Feature.PP})
def other_stages_missing_in_file(original: Any, tensor: Any, like: Any, axis: Any, *, source: int, device: Any) -> Any:
    """a file has the factors of all stages"""
    found = original(tensor, like, axis, source=source, device=device)
    return found if source == 0 else torch.zeros_like(found)


@around(ModelPlan, "stage_of", needs={Feature.PP, Feature.TARGETS}, within=(attach, "draw_adapter"))
def last_layer_without_an_adapter(original: Any, self: ModelPlan, name: str) -> int:
    """each target has its adapter on the stage that has its layer"""
    last = name.startswith(f"{self.layers}.{self.num_layers - 1}.")
    return 0 if last and self.pp_rank else int(original(self, name))  # as if the first stage had it


Given = tuple[tuple[Any, ...], dict[str, Any]]


@after(stages.HeldStages, "begin", needs={Feature.PP, Feature.IMAGE_GRID})
def positions_of_a_later_stage_without_grids(given: Given, self: stages.HeldStages, *_: Any) -> Given:
    """each stage makes the positions of an image's tokens of its grid"""
    args, kwargs = given
    if self.stage > 0:
        kwargs |= {"position_ids": torch.arange(self._shape[1]).expand(self._shape)}
    return args, kwargs


@after(stages.HeldStages, "begin", needs={Feature.PP, Feature.IMAGE_BLOCKS})
def image_mask_of_a_later_stage_shifted(given: Given, self: stages.HeldStages, *_: Any) -> Given:
    """in each stage the tokens of an image see each other, where the model has it so"""
    args, kwargs = given
    for name in TOKEN_TYPES:
        if self.stage > 0 and name in kwargs:
            kwargs[name] = kwargs[name].roll(1, 1)
    return args, kwargs


@after(Trainer, "_trained", needs={Feature.PP, Feature.VISION})
def vision_gradients_of_the_first_stage_lost(factors: list[Factor], self: Trainer, *_: Any) -> list[Factor]:
    """the gradient of a vision part, which the first stage has, is stepped on and counted"""
    for grad in of_vision(self, factors):
        grad.zero_()
    return factors


stream_of_other_tokens_sent = around(stages, "hand_on", needs={Feature.PP})(  # of one sequence the order of its tokens
    passing("a stage sends the residual stream of the micro-batch, in its order", x=lambda x: x.flip(0, 1))
)
second_input_of_other_tokens_sent = after(stages.HeldStages, "_second_of", needs={Feature.PP, Feature.SECOND_INPUTS})(
    result("a layer of a later stage has the second input of its tokens", lambda found: found.flip(0, 1))
)
second_input_gradient_not_sent = after(stages.HeldStages, "_second_of", needs={Feature.PP, Feature.SECOND_INPUTS})(
    result("the second inputs of a later stage's layers have the gradients of that stage", torch.detach)
)
