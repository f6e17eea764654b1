"""The least that a step can take: the products of the base's own matrices alone."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn


def time_products(model: nn.Module, num_tokens: int, steps: int) -> list[float]:
    """Seconds of each of `steps` times all products of the matrices of `model`, forward and backward, one by one, with
    `num_tokens` tokens; without those of adapters, and after one time that is not counted.
    """
    weights = [m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".lora_" not in n]
    inputs = {width: torch.randn(num_tokens, width).to(weights[0].dtype) for w in weights for width in w.shape}
    times = []
    with torch.no_grad():
        for _ in range(steps + 1):
            started = time.perf_counter()
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)
                inputs[weight.shape[0]] @ weight
            times.append(time.perf_counter() - started)
    return times[1:]
