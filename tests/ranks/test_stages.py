"""Messages between stages: forward and backward of each, in order, while a rank goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshlora.comm.collectives import all_reduce_sum, broadcast_of
from meshlora.comm.groups import LocalGroup, open_mesh
from meshlora.comm.messages import hand_on, open_channel, take_over
from meshlora.wings.stages.pipeline_schedule import one_forward_one_backward
from meshlora_ground.topology import Topology
from tests.pool import Pool

_SIZES = (3, 1, 40_000, 2)  # one that no socket takes at once


def _passed_on(topology: str) -> tuple[list[Any], list[Any]]:
    """(what came from the stage before; the gradients of what was sent on), in the order of the micro-batches."""
    mesh = open_mesh(Topology.parse(topology))
    channels, stage = mesh.channels, mesh.topology.stage_of(mesh.rank)
    streams, came, ends = [], [], []
    for number, size in enumerate(_SIZES):  # all forwards first: nobody waits for what it sends to arrive
        x = torch.full((size, 2), 100.0 * mesh.rank + number, dtype=torch.float64).requires_grad_()
        streams.append(x)
        if stage > 0:
            got = take_over(torch.empty_like(x), channels.from_before, channels.to_before)
            came.append(float(got.detach().mean()))
            x = x + got
        ends.append(
            hand_on(x, channels.to_next, channels.from_next) if stage < mesh.pp.size - 1 else (x * (number + 2)).sum()
        )
    for end in ends:
        end.backward()
    all_reduce_sum(torch.zeros(1), mesh.world)  # gloo drops what has not left when its group goes
    return came, [None if x.grad is None else float(x.grad.mean()) for x in streams]


@pytest.mark.parametrize(("topology", "world"), [("pp=2", 2), ("pp=2,tp=2", 4), ("pp=3", 3)])
def test_a_stage_gets_what_the_one_before_sent_and_its_gradient_goes_back(
    topology: str, world: int, pools: Callable[[int], Pool]
) -> None:
    shape = Topology.parse(topology)
    for rank, (came, grads) in enumerate(pools(world).run(_passed_on, topology)):
        before = range(rank % shape.per_stage, rank, shape.per_stage)  # its counterparts in all stages before
        assert came == [sum(100.0 * r + n for r in before) for n in range(len(_SIZES)) if before]
        assert grads == [n + 2.0 for n in range(len(_SIZES))]


def _limits_s() -> list[float]:
    mesh = open_mesh(Topology(pp=2))
    mesh.wait_at_most(7.0)
    groups = [channel.group for channel in mesh.channels.in_order]
    return [group.timeout_s for group in groups if isinstance(group, LocalGroup)]


def test_a_stage_waits_for_another_no_longer_than_for_any_rank(pools: Callable[[int], Pool]) -> None:
    """Groups between stages kept the limit of loading, which is what NCCL waits."""
    assert pools(2).run(_limits_s) == [[7.0, 7.0]] * 2


def _from_stage(source: int) -> tuple[bool, bool]:
    pp = open_mesh(Topology(pp=3)).pp
    whole = torch.tensor([[-0.0, 1.5], [float("nan"), 2.0]])
    found = broadcast_of(whole if pp.rank == source else None, whole, pp, source=source, device=torch.device("cpu"))
    return torch.equal(found.view(torch.int32), whole.view(torch.int32)), found.shape == whole.shape


@pytest.mark.parametrize("source", [0, 1, 2])
def test_a_factor_of_one_stage_comes_to_all_to_the_bit(source: int, pools: Callable[[int], Pool]) -> None:
    assert pools(3).run(_from_stage, source) == [(True, True)] * 3


def _of_a_source_that_has_none() -> list[float]:
    like = torch.ones(2, 2)
    torch.use_deterministic_algorithms(True)  # memory that is not written holds NaN
    try:
        return broadcast_of(None, like, open_mesh(Topology(pp=2)).pp, source=0, device=like.device).flatten().tolist()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_source_that_has_no_factor_sends_zeros_and_not_what_its_memory_held(pools: Callable[[int], Pool]) -> None:
    """Else the fault `last_layer_without_an_adapter` is found in another phase whenever that memory is not finite."""
    assert pools(2).run(_of_a_source_that_has_none) == [[0.0] * 4] * 2


_TURN_S, _MICRO_BATCHES = 0.1, 6


class _Turn(torch.autograd.Function):
    """A stage that takes as long forward as backward, and no core."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(_TURN_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        time.sleep(_TURN_S)
        return grads[0]


def _step_s(topology: str) -> float:
    """Seconds of a step whose stages take a turn for each forward and backward."""
    mesh = open_mesh(Topology.parse(topology))
    channels, interleave, ends = mesh.channels, mesh.topology.interleave, dict[tuple[int, int], torch.Tensor]()
    for channel in channels.in_order:
        open_channel(channel)
    all_reduce_sum(torch.zeros(1), mesh.world)
    started = time.perf_counter()
    order = one_forward_one_backward(_MICRO_BATCHES, rank=mesh.pp.rank, size=mesh.pp.size, interleave=interleave)
    for micro, stage, is_forward in order:
        if not is_forward:
            ends.pop((micro, stage)).backward()
            continue
        x = torch.zeros(64, 512, requires_grad=True)
        if stage > 0:
            x = take_over(x, channels.from_before, channels.to_before)
        x = _Turn.apply(x)
        is_last = stage == mesh.topology.num_stages - 1
        ends[micro, stage] = x.sum() if is_last else hand_on(x, channels.to_next, channels.from_next)
    all_reduce_sum(torch.zeros(1), mesh.world)
    return time.perf_counter() - started


@pytest.mark.proof  # by the clock
@pytest.mark.parametrize("topology", ["pp=2", "pp=3", "pp=2,interleave=2", "pp=3,interleave=2"])
def test_a_step_takes_the_turns_of_its_schedule(topology: str, pools: Callable[[int], Pool]) -> None:
    shape = Topology.parse(topology)
    turns = 2 * (_MICRO_BATCHES * shape.interleave + shape.world - 1)
    taken = max(pools(shape.world).run(_step_s, topology)) / _TURN_S
    assert turns <= taken < 1.1 * turns
