"""What `train.optimizer` asks of an adapter: which of its parameters stay as they are, and what it cannot train.

Owns: these facts, of names and shapes alone. Does not own: the optimizers (`run.optimizer`).
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence

import torch

from meshlora.adapter.plan import AdapterPlan, Trained
from meshlora.plan.grads import Cut
from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology

BLOCK = 256  # elements of a factor, flattened, that share a scale of their moments in 8 bits


def is_frozen(name: str, optimizer: str) -> bool:
    """Whether the factor `name` stays as it is under `train.optimizer`."""
    return optimizer == "lora_fa" and ".lora_A" in name


def has_eight_bits(shape: Sequence[int], least: int) -> bool:
    """Whether moments have 8 bits under adamw_8bit. shape: of the whole parameter. least: `train.min_8bit_size`."""
    return math.prod(shape) >= least


def cuts_blocks(trained: Trained, topology: Topology) -> bool:
    """Whether the part of a parameter on some rank is other than whole blocks of the whole one, in any order."""
    for cut in trained.rule.cuts:
        size = topology.size_over({cut.axis})
        if size > 1 and _cuts_blocks(tuple(trained.shape), cut, size):
            return True
    return False


@functools.cache
def _cuts_blocks(shape: tuple[int, ...], cut: Cut, size: int) -> bool:
    """As `cuts_blocks`, of one cut over `size` ranks: by where each element of a part is in the whole."""
    number = math.prod(shape)
    places = torch.arange(1, number + 1, device="cpu").view(shape)  # from 1: padding is 0
    for rank in range(size):
        own = cut.layout.cut(places, cut.dim, rank=rank, size=size).flatten()
        begins = own[::BLOCK]
        of_blocks = begins.repeat_interleave(BLOCK)[: len(own)] + torch.arange(len(own), device="cpu") % BLOCK
        is_ragged = len(own) % BLOCK != 0 and int(own[-1]) != number
        if is_ragged or bool(((begins - 1) % BLOCK).any()) or not torch.equal(own, of_blocks):
            return True
    return False


def check_trainable(optimizer: str, adapter: AdapterPlan, plan: ModelPlan) -> None:
    """Refuse an adapter that `train.optimizer` would not train as one process does. Raises: UnsupportedError: names
    what of it. UserError: the library of the optimizer is not installed."""
    check({**adapter.asked(plan), "train.optimizer": optimizer})
    if optimizer == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        way_out = "pip install 'meshlora[quantization]'"
        raise UserError("train.optimizer=adamw_8bit", "it needs bitsandbytes", way_out)
