"""Initialisation: a function of (seed, name), not of ranks.

Owns: the values that a fresh adapter starts from. The full factor is drawn on every rank from a generator of its own,
then sliced: the same bits on every topology, and no communication. A local fan-in is never looked at.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from meshlora.adapter.targets import Target


def draw_factors(
    target: Target, shapes: Mapping[str, tuple[int, ...]], *, init: bool | str, seed: int
) -> dict[str, Tensor]:
    """The full factors of `shapes` (`Target.shapes`) but for magnitudes, in float32, on the CPU.

    init: as `peft.LoraConfig.init_lora_weights`. True: A Kaiming-uniform with a=sqrt(5), B zero. "gaussian":
    A ~ N(0, 1/r^2), B zero. False: A and B both Kaiming-uniform, so that the adapter is not the identity. An embedding
    has A zero and B ~ N(0, 1), and both normal where False. Each piece of a fused matrix has a draw of its own.
    """
    factors: dict[str, Tensor] = {}
    for part, shape in shapes.items():
        side = part.partition(".")[0]
        if side == "magnitude":
            continue
        kind = "lora_embedding" if target.is_embedding else "lora"
        generator = _generator(seed, f"{target.name}.{kind}_{part}")
        if target.is_embedding:
            is_drawn = side == "B" or init is False
            factors[part] = torch.randn(shape, generator=generator) if is_drawn else torch.zeros(shape)
        elif side == "B" and init is not False:
            factors[part] = torch.zeros(shape)
        elif init == "gaussian" and side == "A":
            factors[part] = torch.randn(shape, generator=generator) / target.r
        else:
            factors[part] = _kaiming_uniform(shape, generator)
    return factors


def _kaiming_uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)): `torch.nn.init.kaiming_uniform_` with a=sqrt(5), the default of nn.Linear."""
    bound = 1 / math.sqrt(shape[1])
    return (torch.rand(shape, generator=generator) * 2 - 1) * bound


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
