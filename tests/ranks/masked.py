"""LoRA's dropout in transformers and PEFT on one process, with the masks of a step on a mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshlora_ground.masks import keep_mask, mask_key, numbers_by_content
from meshlora_judge.experts import plain_name


class MaskedPeft:
    """Every `nn.Dropout` of the PEFT model `model` drops by these masks: of step `step`, from 0, set by the caller.

    adapter: the name of the active one.
    """

    def __init__(self, model: nn.Module, *, seed: int, adapter: str = "default") -> None:
        self.seed, self.step, self.num_dropped = seed, 0, 0
        self._numbers: Tensor | None = None
        for path, module in model.named_modules():
            if isinstance(module, nn.Dropout) and module.p > 0:
                module.forward = self._forward(plain_name(path).removesuffix(f".{adapter}"), module.p)  # type: ignore[method-assign]
        model.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._numbers = numbers_by_content(kwargs["input_ids"], kwargs.get("attention_mask"))

    def _forward(self, name: str, p: float) -> Any:
        def forward(input: Tensor) -> Tensor:
            assert self._numbers is not None
            self.num_dropped += 1
            features = torch.arange(input.shape[-1])
            kept = keep_mask(mask_key(self.seed, self.step, name), self._numbers.reshape(-1), features, p)
            return torch.where(kept.view(input.shape), input / (1 - p), torch.zeros_like(input))

        return forward
