"""The ring on ranks: attention to keys that pass by is attention to all keys, with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from meshlora.comm.groups import open_mesh
from meshlora.comm.messages import pass_on
from meshlora.layers.held_tokens import HeldTokens
from meshlora.plan.token_order import token_order
from meshlora.wings.context.attention_parts import How, Part, attend
from meshlora.wings.context.context import RowsOfMask
from meshlora_ground.topology import Topology
from tests.for_each import for_each
from tests.pool import Pool

ROWS = [[13, 17, 5, 1], [2, 30, 3, 1]]  # documents, and padding, of two rows of 36
WINDOW = 9


def _passed(size: int) -> float:
    axis = open_mesh(Topology(cp=size)).cp
    return float(pass_on(torch.full((2, 3), float(axis.rank)), axis)[1, 2])


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_has_what_the_one_before_it_had(size: int, pools: Callable[[int], Pool]) -> None:
    assert pools(size).run(_passed, size) == [float((rank - 1) % size) for rank in range(size)]


def _mask(window: int) -> RowsOfMask:
    numbers = torch.stack([torch.repeat_interleave(torch.arange(4), torch.tensor(row)) for row in ROWS])
    base = sliding_window_causal_mask_function(window)
    given: dict[str, Any] = {
        "batch_size": 2,
        "q_length": 36,
        "kv_length": 36,
        "mask_function": and_masks(base, packed_sequence_mask_function(numbers)),
        "attention_mask": None,
        "allow_is_causal_skip": False,
        "device": torch.device("cpu"),
    }
    return RowsOfMask(AttentionMaskInterface()["sdpa"], given)


def _off(size: int, window: int, options: dict[str, Any], is_balanced: bool) -> tuple[float, int]:
    """(the worst difference of this rank's outputs and gradients, the number of its parts that are slices)."""
    axis = open_mesh(Topology(cp=size)).cp
    order = token_order(ROWS, size=size, is_balanced=is_balanced)
    held, mask = HeldTokens(order, axis, torch.device("cpu")), _mask(window)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    whole: list[Any] = [draw(2, 4, 36, 8), draw(2, 36, 2, 16), draw(4) if options.get("sinks") else None]
    weights, how = draw(2, 36, 4, 8).detach(), How(0.4, options.get("softcap"), 8)
    every = Part(slice(None), slice(0, 36), slice(0, 36), mask.whole.contiguous())
    expected = attend(*whole, [[every]], how, axis)
    (expected * weights).sum().backward()

    def own_queries(x: Tensor) -> Tensor:
        return held.cut(x.detach().transpose(1, 2), 1).transpose(1, 2)

    own = [own_queries(whole[0]).requires_grad_(), held.cut(whole[1].detach(), 1).requires_grad_()]
    sinks = None if whole[2] is None else whole[2].detach().clone().requires_grad_()
    parts = mask.parts(held, in_ring=True)
    found = attend(own[0], own[1], sinks, parts, how, axis)
    (found * held.cut(weights, 1)).sum().backward()
    pairs = [(found, held.cut(expected, 1)), (own[0].grad, own_queries(whole[0].grad))]
    pairs.append((own[1].grad, held.cut(whole[1].grad, 1)))
    if sinks is not None:
        every_rank = torch.zeros_like(sinks)
        passing = sinks.grad
        for _ in range(size):
            every_rank, passing = every_rank + passing, pass_on(passing, axis)
        pairs.append((every_rank, whole[2].grad))
    worst = float(torch.stack([(a - b).detach().abs().max() for a, b in pairs]).max())  # nan, if one is
    return worst, sum(part.mask is None for of_step in parts for part in of_step)


@for_each("size", [2, 3])
@for_each("window", [36, WINDOW], ids=["causal", "window"])
@for_each("is_balanced", [True, False], ids=["balanced", "contiguous"])
@for_each("options", [{}, {"sinks": True, "softcap": 0.8}], ids=["plain", "sinks and softcap"])
def test_what_passes_by_is_attended_to_as_if_it_were_all_there(
    options: dict[str, Any], is_balanced: bool, window: int, size: int, pools: Callable[[int], Pool]
) -> None:
    found = pools(size).run(_off, size, window, options, is_balanced)
    assert max(worst for worst, _ in found) < 1e-13
    # Rows that are dealt alike, and are short, share masks.
    assert window < 36 or not is_balanced or all(number > 0 for _, number in found)


def _parts_of_ranks(size: int) -> list[list[int]]:
    axis = open_mesh(Topology(cp=size)).cp
    held = HeldTokens(token_order([[48]], size=size), axis, torch.device("cpu"))
    given = _mask(36).given | {"batch_size": 1, "q_length": 48, "kv_length": 48}
    parts = RowsOfMask(AttentionMaskInterface()["sdpa"], given | {"mask_function": causal_mask_function}).parts(
        held, in_ring=True
    )
    assert all(part.mask is None for of_step in parts for part in of_step)
    return [[(p.queries.stop - p.queries.start) * (p.keys.stop - p.keys.start) for p in of_step] for of_step in parts]


def test_balanced_causal_work_of_each_step_is_alike_on_all_ranks(pools: Callable[[int], Pool]) -> None:
    """Own keys: a triangle; of those of another rank all queries see the head, or the later half sees all."""
    assert pools(3).run(_parts_of_ranks, 3) == [[[256], [128], [128]]] * 3
