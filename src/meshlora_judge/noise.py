"""The judge's noise on embedded tokens (NEFTune), around transformers and peft.

Written a second time from the paper's equation, with L the length of each sequence. The numbers drawn
(`meshlora_ground.masks`) are a shared input, like the sequences; nothing of `layers.noise` is used.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from meshlora_ground.masks import noise_key, uniform
from meshlora_judge.dropout import Masks


def add_noise(model: Any, masks: Masks, *, alpha: float) -> None:
    """Add noise to the output of the PEFT model's input embedding inside `masks.of_batch`; none with an alpha of 0."""
    if alpha:
        model.get_base_model().get_input_embeddings().register_forward_hook(_hook(masks, alpha))


def _hook(masks: Masks, alpha: float) -> Any:
    def hook(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
        batch = masks.batch
        if batch is None:
            return embedded
        width, noise = embedded.shape[2], torch.zeros_like(embedded)
        for row in range(len(embedded)):
            place, length = batch.first_place + row * batch.stride, int(batch.attention_mask[row].sum())
            numbers = place * 2**32 + torch.arange(length, device=embedded.device)
            features = torch.arange(width, device=embedded.device)
            drawn = uniform(noise_key(masks.seed, masks.step), numbers, features, torch.float64)
            noise[row, :length] = drawn * (alpha / math.sqrt(length * width))
        return embedded + noise

    return hook
