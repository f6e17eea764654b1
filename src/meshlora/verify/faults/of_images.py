"""Faults of images: their tokens, their order, positions, features, and the gradients of a vision part."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.attach import Factor, runtime
from meshlora.model import regions
from meshlora.run.trainer import Trainer
from meshlora.train import batches, losses
from meshlora.train.batch import IGNORED, Batch
from meshlora.verify.faults.fault import after, around
from meshlora.verify.features import Feature
from meshlora_ground.further_inputs import TOKEN_TYPES

_COLLATE = importlib.import_module("meshlora.train.collation")
Inputs = Mapping[str, Tensor]
Cut = Callable[[Tensor], Tensor]


@after(batches, "collate", needs={Feature.IMAGES})
def image_tokens_trained(batch: Batch, sequences: Any, **_: Any) -> Batch:
    """a token that stands for an image is not trained"""
    if not sequences:
        return batch
    following = batch.input_ids.roll(-1, 1)
    labels = torch.where(following == sequences[0].more.func.__self__.token, following, batch.labels)
    return dataclasses.replace(batch, labels=labels, num_trained_tokens=int((labels != IGNORED).sum()))


@around(batches, "collate", needs={Feature.IMAGES})
def images_of_another_sequence(original: Any, sequences: Sequence[Any], **rest: Any) -> Batch:
    """a sequence has the features of its own images"""

    def others(sequence: Any) -> dict[str, Tensor]:
        more = dict(sequence.more())
        if "pixel_values" in more:  # a sequence without an image has none
            more["pixel_values"] = more["pixel_values"].flip(-1)
        return more

    changed = [dataclasses.replace(s, more=functools.partial(others, s)) for s in sequences]
    found: Batch = original(changed, **rest)
    return found


@after(_COLLATE, "_more", needs={Feature.IMAGES})
def pixels_in_another_order(more: dict[str, Tensor], *_: Any) -> dict[str, Tensor]:
    """pixels are in the order of the placeholders"""
    if "pixel_values" not in more:
        return more
    return more | {"pixel_values": more["pixel_values"].flip(0)}


@after(losses, "further_inputs", needs={Feature.IMAGE_GRID})
def grid_of_images_without_positions(inputs: dict[str, Tensor], *_: Any) -> dict[str, Tensor]:
    """positions of an image's tokens are those of its grid"""
    types = inputs.get("mm_token_type_ids")
    if types is None:
        return inputs
    return {**inputs, "position_ids": torch.arange(types.shape[1]).expand_as(types)}


@after(losses, "further_inputs", needs={Feature.IMAGE_BLOCKS})
def images_seen_causally(inputs: dict[str, Tensor], *_: Any) -> dict[str, Tensor]:
    """the tokens of an image see each other, where the model has it so"""
    return {name: value for name, value in inputs.items() if name not in TOKEN_TYPES}


@around(regions, "cut_deepstack", needs={Feature.SP, Feature.FEATURES})
def features_of_layers_at_other_tokens(original: Any, model: Any, cut: Cut) -> None:
    """features that a tower gives for the first layers are added to the tokens of their image"""
    original(model, lambda whole: cut(whole).roll(1, 1))


@around(regions, "cut_deepstack", needs={Feature.SP, Feature.FEATURES, Feature.VISION})
def features_of_layers_without_gradient(original: Any, model: Any, cut: Cut) -> None:
    """a tower has a gradient of each of its features"""
    original(model, lambda whole: cut(whole.detach()))


def of_vision(self: Trainer, factors: list[Factor]) -> list[Tensor]:
    """The gradients of the factors that are beside the text part."""
    plan = runtime(self.model).plan
    found = []
    for factor in factors:
        grad, module = factor.parameter.grad, factor.name.partition(".lora_")[0]
        if grad is not None and not plan.is_text(module):
            found.append(grad)
    return found


@after(Trainer, "_trained", needs={Feature.TP, Feature.VISION})
def vision_gradients_counted_on_each_rank(factors: list[Factor], self: Trainer, *_: Any) -> list[Factor]:
    """the gradient of a vision part, which each tp rank has whole, counts once"""
    for grad in of_vision(self, factors):
        grad.mul_(self.mesh.tp.size)
    return factors


@after(Trainer, "_trained", needs={Feature.DP, Feature.VISION})
def vision_gradients_of_a_rank_lost(factors: list[Factor], self: Trainer, *_: Any) -> list[Factor]:
    """the gradient of a vision part is that of the images of all dp ranks"""
    if self.mesh.dp.rank == 0:
        for grad in of_vision(self, factors):
            grad.zero_()
    return factors
