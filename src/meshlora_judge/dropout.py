"""The judge's dropout: the `nn.Dropout` modules of transformers and peft, with the run's masks.

Owns: which tokens a call sees, on one process that has all of them. The bits of the masks (`meshlora_ground.masks`) are
a shared input, like the sequences; nothing of `layers.dropout` is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshlora_ground.masks import keep_mask, mask_key
from meshlora_judge.batches import MicroBatch
from meshlora_judge.experts import plain_name
from meshlora_judge.invoked import acting_rows


class Masks:
    """Replaces the forward of every `nn.Dropout` in the PEFT model `model`. Outside `of_batch` nothing is dropped.

    seed: the run's. step: the optimizer step, from 0, set by the caller. rates: module -> dropout rate.
    batch: that of the running training forward.
    """

    def __init__(self, model: nn.Module, *, seed: int) -> None:
        self.model, self.seed, self.step = model, seed, 0
        self.rates: dict[str, float] = {}
        self.batch: MicroBatch | None = None
        for path, module in model.named_modules():
            if isinstance(module, nn.Dropout) and module.p > 0:
                name = plain_name(path)
                self.rates[name] = module.p
                module.forward = self._forward(name, module.p)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def of_batch(self, batch: MicroBatch) -> Iterator[None]:
        """Inside, forwards are training forwards of `batch`."""
        self.batch = batch
        try:
            yield
        finally:
            self.batch = None

    def _forward(self, name: str, p: float) -> Any:
        def forward(input: Tensor) -> Tensor:
            if self.batch is None:
                return input
            batch_size, length = self.batch.input_ids.shape
            place = torch.arange(batch_size, device=input.device) * self.batch.stride + self.batch.first_place
            number = place[:, None] * 2**32 + torch.arange(length, device=input.device)
            if input.ndim == 2 and len(input) == batch_size:  # after pooling: a sequence counts as its first token
                number = number[:, :1]
            numbers = number.reshape(-1)
            if input.ndim == 2 and (acts := acting_rows(self.model, self.batch.input_ids)) is not None:
                numbers = numbers[acts.flatten()]  # PEFT drops of the rows alone on which the adapter acts
            features = torch.arange(input.shape[-1], device=input.device)
            kept = keep_mask(mask_key(self.seed, self.step, name), numbers, features, p)
            return torch.where(kept.view(input.shape), input / (1 - p), torch.zeros_like(input))

        return forward
