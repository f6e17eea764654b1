"""Initialisation: a function of (seed, name), not of ranks.

Owns: the values that a fresh adapter starts from. The full factor is drawn on every rank from a generator of its own,
then sliced: the same bits on every topology, and no communication. A local fan-in is never looked at.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from meshlora.adapter.targets import Target
from meshlora.plan.rules import LinearRule


def draw_factors(target: Target, rule: LinearRule, *, init: bool | str, seed: int) -> dict[str, Tensor]:
    """The full factors `{"A": [r, in], "B": [out, r]}` in float32, on the CPU.

    init: as `peft.LoraConfig.init_lora_weights`. True: A Kaiming-uniform with a=sqrt(5), B zero. "gaussian":
    A ~ N(0, 1/r^2), B zero. False: A and B both Kaiming-uniform, so that the adapter is not the identity.
    """
    shape_a, shape_b = (target.r, rule.in_features), (rule.out_features, target.r)
    generator = _generator(seed, f"{target.name}.lora_A")
    if init == "gaussian":
        a = torch.randn(shape_a, generator=generator) / target.r
    else:
        a = _kaiming_uniform(shape_a, generator)
    if init is False:
        return {"A": a, "B": _kaiming_uniform(shape_b, _generator(seed, f"{target.name}.lora_B"))}
    return {"A": a, "B": torch.zeros(shape_b)}


def _kaiming_uniform(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)): `torch.nn.init.kaiming_uniform_` with a=sqrt(5), the default of nn.Linear."""
    bound = 1 / math.sqrt(shape[1])
    return (torch.rand(shape, generator=generator) * 2 - 1) * bound


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
