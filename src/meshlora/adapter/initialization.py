"""Initialisation of adapters: a function of (seed, name), not of ranks.

Owns: the initial values of an adapter, and `Start`, what `init_lora_weights` says of them. Does not own: those that
look at the base or at data (`wings.starts`).

Every rank draws the full factor from a generator seeded by the factor's name, then slices it: the same bits on every
topology, no communication. The fan-in is always that of the full matrix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from peft import LoraConfig
from torch import Tensor

from meshlora.adapter.targets.resolve import Target
from meshlora.comm.groups import Mesh
from meshlora.feature import first_answer
from meshlora.layers.linear import ParallelLinear
from meshlora.plan.rules import ModelPlan


class Start:
    """How the factors of an adapter begin, by its `init_lora_weights`. A wing extends it for words of its own.

    Attributes:
        changes_base: the factors are taken out of the weights; also where a file gives them, as it has the adapter of
            what is left of these. looks_at_data: those that are drawn are replaced before the first step.
    """

    changes_base = looks_at_data = False

    def __init__(self, init: bool | str) -> None:
        self.init = init

    def check(self, config: LoraConfig, targets: Mapping[str, Target], plan: ModelPlan) -> None:
        """Refuse targets that cannot begin so. Raises: UserError, UnsupportedError: names the first one."""

    def draw(self, target: Target, *, seed: int) -> dict[str, Tensor]:
        """As `draw_factors`."""
        return draw_factors(target, init=self.init, seed=seed)

    def take_out_of_base(self, leaf: ParallelLinear, mesh: Mesh, target: Target) -> dict[str, Tensor]:
        """The full `{"A", "B"}`, subtracted from the weight of `leaf`. Collective."""
        raise AssertionError(f"{self.init!r} changes no weight")


def start_of(config: LoraConfig) -> Start:
    """What `init_lora_weights` of `config` says. Raises: UserError, UnsupportedError: a wing refuses an option."""
    return first_answer(lambda wing: wing.start_of(config)) or Start(config.init_lora_weights)


def draw_factors(target: Target, *, init: bool | str, seed: int) -> dict[str, Tensor]:
    """The full factors of `target`, in float32 on the CPU.

    init: as `peft.LoraConfig.init_lora_weights`. True: A Kaiming-uniform with a=sqrt(5), B zero. "gaussian":
    A ~ N(0, 1/r^2), B zero. False: A and B both Kaiming-uniform, so that the adapter is not the identity. An embedding
    has A zero and B ~ N(0, 1); with False both are normal. Each piece of a fused matrix and each expert has its own
    draw; where PEFT mistakes the experts' input for their output, A and B swap roles.
    """
    found = {}
    for part, shape in target.shapes.items():
        if part not in target.further:  # which begins as the base has it
            found[part] = _draw(target, part, shape, init=init, seed=seed)
    return found


def _draw(target: Target, part: str, shape: tuple[int, ...], *, init: bool | str, seed: int) -> Tensor:
    side, name = part.partition(".")[0], target.name_of(part)
    if target.is_embedding:
        if side == "A" and init is not False:
            return torch.zeros(shape)
        return torch.randn(shape, generator=generator_of(seed, name))
    # In PEFT's terms: the fan-in of its A is the input, the fan-in of its B the rank.
    is_first = (side == "A") != target.is_swapped
    if not is_first and init is not False:
        return torch.zeros(shape)
    matrix = shape[-2:]
    fan_in = matrix[0] if target.is_swapped else matrix[1]
    names = [name]
    if target.num_experts and not target.is_shared:
        names = [f"{name}.{expert}" for expert in range(shape[0])]
    drawn = []
    for own in names:
        if init == "gaussian" and is_first:
            drawn.append(torch.randn(matrix, generator=generator_of(seed, own)) / target.r)
        else:
            # U(-1/sqrt(fan_in), 1/sqrt(fan_in)), as `kaiming_uniform_` with a=sqrt(5), the default of nn.Linear.
            drawn.append((torch.rand(matrix, generator=generator_of(seed, own)) * 2 - 1) * (1 / math.sqrt(fan_in)))
    return torch.stack(drawn).view(shape)


def generator_of(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # Of the name, not of a counter: a target more or less changes no other draw.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
