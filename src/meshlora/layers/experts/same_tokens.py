"""Whether the tp ranks of a model are given the same tokens: compared in its first forwards.

Owns: which forwards these are, and what is compared. Does not own: which rows a rank should have (`data.sampler`).

tp ranks compute one forward together, each a part of every product. Where loops or samplers give them different rows,
the sums mix the rows of one rank with those of another. Nothing fails as long as the shapes are alike: losses come
out somewhere near the right ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshlora.comm.collectives import all_gather
from meshlora.comm.groups import Axis
from meshlora.common.errors import UserError
from meshlora.plan.budget import COMPARED_FORWARDS

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
# Odd, with bits set at random: of xxHash.
_FACTORS = (-7046029288634856825, -4417276706812531889, 1609587929392839161)


def compare_first_tokens(model: nn.Module, tp: Axis) -> None:
    """Let the first forwards of `model`, with gradients and without, compare what they are given over `tp`.

    Each costs a gather of three numbers, and the host waits for them.
    """
    if tp.size == 1:
        return
    left = dict.fromkeys((True, False), COMPARED_FORWARDS)  # with gradients, and without

    def compare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_gradients = torch.is_grad_enabled()
        name, given = given_tokens(args, kwargs)
        if given is not None and left[has_gradients]:
            left[has_gradients] -= 1
            _compare(name, given, tp)

    model.register_forward_pre_hook(compare, with_kwargs=True)


def given_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Tensor | None]:
    """The argument of a model's forward that its tokens are in, `[B, S]`, or what stands for them, `[B, S, H]`."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(given := kwargs.get(name), Tensor):
            return name, given
    return "input_ids", args[0] if args else None


def _compare(name: str, given: Tensor, tp: Axis) -> None:
    """Raises UserError, on all ranks of `tp`, where they differ."""
    of_ranks = all_gather(_fingerprint(given), tp).tolist()
    if any(one != of_ranks[0] for one in of_ranks):
        shapes = [
            f"{rows} rows of {numel // max(rows, 1)} on rank {rank}"
            for rank, (rows, numel, _) in zip(tp.ranks, of_ranks, strict=True)
        ]
        raise UserError(
            f"tp ranks see different tokens: the {name} of this forward differ ({', '.join(shapes)})",
            "tp ranks compute one forward together, each a part of it, and need the same rows in the same order",
            "give each rank the rows of its dp rank, as meshlora.data.share(..., dp_rank=mesh.dp.rank, "
            "dp_size=mesh.dp.size) or DistributedSampler(num_replicas=mesh.dp.size, rank=mesh.dp.rank) does",
        )


def _fingerprint(given: Tensor) -> Tensor:
    """`[1, 3]`, int64: rows, numbers, and a hash of them and their places. Made on the device, without waiting."""
    bits = given.detach().contiguous()
    if bits.is_floating_point():
        bits = bits.view(_INTEGERS[bits.element_size()])
    bits = bits.flatten().long()
    mixed = bits * _FACTORS[0] + torch.arange(len(bits), device=bits.device) * _FACTORS[1]  # wraps around
    mixed = (mixed ^ (mixed >> 29)) * _FACTORS[2]
    found = torch.empty(1, 3, dtype=torch.int64, device=given.device)
    found[0, 0], found[0, 1], found[0, 2] = given.shape[0], given.numel(), (mixed ^ (mixed >> 32)).sum()
    return found
