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

from meshlora.adapter.targets.resolve import Target


def draw_factors(
    target: Target, shapes: Mapping[str, tuple[int, ...]], *, init: bool | str, seed: int
) -> dict[str, Tensor]:
    """The full factors of `shapes` (`Target.shapes`) but for magnitudes, in float32, on the CPU.

    init: as `peft.LoraConfig.init_lora_weights`. True: A Kaiming-uniform with a=sqrt(5), B zero. "gaussian":
    A ~ N(0, 1/r^2), B zero. False: A and B both Kaiming-uniform, so that the adapter is not the identity. An embedding
    has A zero and B ~ N(0, 1), and both normal where False. Each piece of a fused matrix has a draw of its own, and so
    has each expert; where PEFT takes the input of experts for their output, A and B change places.
    """
    return {
        part: _draw(target, part, shape, init=init, seed=seed)
        for part, shape in shapes.items()
        if not part.startswith("magnitude")
    }


def _draw(target: Target, part: str, shape: tuple[int, ...], *, init: bool | str, seed: int) -> Tensor:
    side = part.partition(".")[0]
    kind = "lora_embedding" if target.is_embedding else "lora"
    name = f"{target.name}.{kind}_{part}"
    if target.is_embedding:
        is_drawn = side == "B" or init is False
        return torch.randn(shape, generator=_generator(seed, name)) if is_drawn else torch.zeros(shape)
    # In PEFT's words: of what it calls A the fan-in is the input, of what it calls B the rank.
    is_first = (side == "A") != target.is_swapped
    if not is_first and init is not False:
        return torch.zeros(shape)
    matrix = shape[-2:]
    names = (
        [f"{name}.{expert}" for expert in range(shape[0])] if target.num_experts and not target.is_shared else [name]
    )
    if init == "gaussian" and is_first:
        drawn = [torch.randn(matrix, generator=_generator(seed, own)) / target.r for own in names]
    else:
        fan_in = matrix[0] if target.is_swapped else matrix[1]
        drawn = [_uniform(matrix, fan_in, _generator(seed, own)) for own in names]
    return torch.stack(drawn).view(shape)


def _uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)): `torch.nn.init.kaiming_uniform_` with a=sqrt(5), the default of nn.Linear."""
    return (torch.rand(shape, generator=generator) * 2 - 1) * (1 / math.sqrt(fan_in))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
