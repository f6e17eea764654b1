"""A check in a model's first forwards, and in those of a step, that its tp ranks receive the same tokens.

Owns: which forwards are checked, and what is compared. Does not own: which rows a rank should have (`reading.sampler`).

tp ranks compute one forward together, each a part of every product. If loops or samplers give them different rows, the
sums mix the rows of one rank with those of another. Nothing fails as long as the shapes agree: losses come out
somewhere near the right ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_gather
from meshlora.comm.groups import Axis, Mesh
from meshlora.layers.held_tokens import ContextCut
from meshlora.loading.own_loop import given_tokens
from meshlora_ground.errors import UserError, numbered
from meshlora_ground.masks import hashed_in_place

# How many forwards are compared: the first ones with gradients, and the first ones without.
COMPARED_FORWARDS = 2
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def watch_tokens(model: Any) -> None:
    """`compare_first_tokens` of a model that is loaded, and those of each step of a loop of the caller's own."""
    state = runtime(model)
    compare_first_tokens(model, state.mesh, state.context, always=lambda: state.loop.is_in_step)


def compare_first_tokens(
    model: nn.Module, mesh: Mesh, context: ContextCut, *, always: Callable[[], bool] = lambda: False
) -> None:
    """Make the first forwards of `model`, with gradients and without, compare their inputs over the ranks that compute
    them together: those along tp, and along cp if they are cut over it.

    Each comparison costs a gather of three numbers and a host sync. always: whether the running forward is compared,
    whatever its number, and with its mask and labels.
    """
    if mesh.same_rows.size == 1:
        return
    left = dict.fromkeys((True, False), COMPARED_FORWARDS)  # with gradients, and without

    def compare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_gradients, wants_all = torch.is_grad_enabled(), always()
        name, given = given_tokens(args, kwargs)
        if given is None or not (left[has_gradients] or wants_all):
            return
        together = mesh.tp if context.held is None else mesh.same_rows
        left[has_gradients] = max(0, left[has_gradients] - 1)
        more = {each: kwargs.get(each) for each in ("attention_mask", "labels") if wants_all}
        _compare({name: given} | {each: value for each, value in more.items() if isinstance(value, Tensor)}, together)

    model.register_forward_pre_hook(compare, with_kwargs=True)


def _compare(given: dict[str, Tensor], tp: Axis) -> None:
    """Raises UserError, on all ranks of `tp`, if their inputs differ. given: the tokens first."""
    if tp.size == 1:
        return
    tokens, *more = given.values()
    own = fingerprint(tokens)
    for place, value in enumerate(more):
        # Weighted by place: a mask and labels that have changed places do not cancel.
        own[0, 2] += (place + 3) * fingerprint(value)[0, 2]
    of_ranks = all_gather(own, tp).tolist()
    if other := [rank for rank, one in zip(tp.ranks, of_ranks, strict=True) if one != of_ranks[0]]:
        shapes = [
            f"{rows} rows of {numel // max(rows, 1)} on rank {rank}"
            for rank, (rows, numel, _) in zip(tp.ranks, of_ranks, strict=True)
        ]
        raise UserError(
            f"tp ranks see different tokens: the {' or '.join(given)} of this forward differ on "
            f"{numbered('rank', other)} from those of rank {tp.ranks[0]} ({', '.join(shapes)})",
            "tp ranks compute one forward together, each a part of it, and need the same rows in the same order",
            "give each rank the rows of its dp rank, as meshlora.sampler(model, dataset, ...) or "
            "DistributedSampler(num_replicas=mesh.dp.size, rank=mesh.dp.rank) does",
        )


def fingerprint(given: Tensor) -> Tensor:
    """int64 `[1, 3]`: rows, elements, and a hash of values and positions. Computed on the device, without a sync."""
    bits = given.detach().contiguous()
    if bits.is_floating_point():
        bits = bits.view(_INTEGERS[bits.element_size()])
    bits = bits.flatten().long()
    hashed = hashed_in_place(bits, torch.arange(len(bits), device=bits.device))
    found = torch.empty(1, 3, dtype=torch.int64, device=given.device)
    found[0, 0], found[0, 1], found[0, 2] = given.shape[0], given.numel(), hashed.sum()
    return found
