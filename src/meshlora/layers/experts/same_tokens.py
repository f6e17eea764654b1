"""A check in a model's first forwards that its tp ranks receive the same tokens.

Owns: which forwards are checked, and what is compared. Does not own: which rows a rank should have (`data.sampler`).

tp ranks compute one forward together, each a part of every product. If loops or samplers give them different rows, the
sums mix the rows of one rank with those of another. Nothing fails as long as the shapes agree: losses come out
somewhere near the right ones.
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
# Odd, with random bits: constants of xxHash.
_FACTORS = (-7046029288634856825, -4417276706812531889, 1609587929392839161)


def compare_first_tokens(model: nn.Module, tp: Axis) -> None:
    """Make the first forwards of `model`, with gradients and without, compare their inputs over `tp`.

    Each comparison costs a gather of three numbers and a host sync.
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
    """(name, value) of the token argument of a model's forward: ids `[B, S]`, or embeddings `[B, S, H]`."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(given := kwargs.get(name), Tensor):
            return name, given
    return "input_ids", args[0] if args else None


def _compare(name: str, given: Tensor, tp: Axis) -> None:
    """Raises UserError, on all ranks of `tp`, if their inputs differ."""
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
    """int64 `[1, 3]`: rows, elements, and a hash of values and positions. Computed on the device, without a sync."""
    bits = given.detach().contiguous()
    if bits.is_floating_point():
        bits = bits.view(_INTEGERS[bits.element_size()])
    bits = bits.flatten().long()
    mixed = bits * _FACTORS[0] + torch.arange(len(bits), device=bits.device) * _FACTORS[1]  # wraps around
    mixed = (mixed ^ (mixed >> 29)) * _FACTORS[2]
    found = torch.empty(1, 3, dtype=torch.int64, device=given.device)
    found[0, 0], found[0, 1], found[0, 2] = given.shape[0], given.numel(), (mixed ^ (mixed >> 32)).sum()
    return found
