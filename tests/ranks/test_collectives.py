"""Every collective passes the adjoint test: <f(x), y> == <x, f*(y)>, where values held by all ranks count once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshlora.comm import collectives, direct, messages
from meshlora.comm.groups import Axis, open_mesh
from meshlora.processes.links import Meeting
from meshlora_ground.topology import Topology
from tests.for_each import for_each
from tests.pool import Pool

# name -> (input is one, output is one, rows in, rows out) for rows counted in units of `size`.
# one: all ranks hold the same value. each: every rank holds its own.
MOVEMENTS = {
    "copy_one_to_each": ("one", "each", 1, 1),
    "reduce_each_to_one": ("each", "one", 1, 1),
    "gather_each_to_each": ("each", "each", 1, 2),
    "reduce_scatter_each_to_each": ("each", "each", 2, 1),
    "gather_each_to_one": ("each", "one", 1, 2),
    "slice_one_to_each": ("one", "each", 2, 1),
}


def _value(kind: str, rows: int, axis: Axis, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed if kind == "one" else seed + 1 + axis.rank)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64)


def _inner(a: Tensor, b: Tensor, kind: str, axis: Axis) -> float:
    """Global inner product: a value that all ranks hold alike counts once."""
    local = (a * b).sum().reshape(1)
    return float(local if kind == "one" else collectives.all_reduce_sum(local, axis))


def _adjoint(name: str, size: int) -> tuple[float, float]:
    axis = open_mesh(Topology(tp=size)).tp
    kind_in, kind_out, rows_in, rows_out = MOVEMENTS[name]
    grow = {1: 2, 2: 2 * size}
    x = _value(kind_in, grow[rows_in], axis, 10).requires_grad_()
    result = getattr(collectives, name)(x, axis)
    assert result.shape[0] == grow[rows_out]
    y = _value(kind_out, grow[rows_out], axis, 20)
    result.backward(y)
    assert x.grad is not None
    return _inner(result.detach(), y, kind_out, axis), _inner(x.detach(), x.grad, kind_in, axis)


@for_each("size", [2, 4])
@for_each("name", MOVEMENTS)
def test_backward_is_the_adjoint_of_forward(name: str, size: int, pools: Callable[[int], Pool]) -> None:
    for forward, backward in pools(size).run(_adjoint, name, size):
        assert forward == pytest.approx(backward, rel=1e-13)


def _leaves_input_alone(name: str) -> bool:
    axis = open_mesh(Topology(tp=2)).tp
    x = torch.ones(4, 3)
    getattr(collectives, name)(x, axis)
    return bool((x == 1).all())


@for_each("name", [*MOVEMENTS, "all_reduce_sum", "all_gather", "reduce_scatter_sum"])
def test_input_is_not_overwritten(name: str, pools: Callable[[int], Pool]) -> None:
    assert all(pools(2).run(_leaves_input_alone, name))


def _passed_on(size: int, step: int) -> list[float]:
    axis = open_mesh(Topology(tp=size)).tp
    found = messages.receive_from_neighbour(torch.full((2, 3), -1.0), axis, step=step)
    messages.send_to_neighbour(found + 10 * axis.rank, axis, step=step)
    return found.unique().tolist()


@pytest.mark.parametrize(("step", "expected"), [(1, [[-1], [-1], [9]]), (-1, [[29], [19], [-1]])])
def test_each_rank_goes_on_from_what_its_neighbour_has(
    step: int, expected: list[list[float]], pools: Callable[[int], Pool]
) -> None:
    assert pools(3).run(_passed_on, 3, step) == expected


def _direct_and_torchs(size: int, number: int, dtype: torch.dtype, has_links: bool) -> tuple[dict[str, float], Tensor]:
    """(by collective the worst difference between ours and torch's, relative; the bits of our sum).

    has_links: False as on ranks of which the last one is on another machine.
    """
    axis = open_mesh(Topology(tp=size)).tp
    gloo = dist.new_group(backend="gloo")
    if not has_links:
        axis = Axis(axis.size, axis.rank, axis.ranks, gloo)
    assert axis.is_direct
    connect = Meeting.connect
    reaches = has_links or axis.rank < size - 1
    with mock.patch.object(Meeting, "connect", lambda *args: connect(*args) and reaches):
        assert (direct.links_of(axis) is not None) == has_links
    generator = torch.Generator().manual_seed(axis.rank)
    x = torch.randn(number * size, generator=generator, dtype=torch.float64).to(dtype)
    ragged = x[:-1].clone()  # does not divide by the ranks
    expected = {"all_reduce": ragged.to(torch.float64, copy=True), "all_gather": x.new_empty(x.numel() * size)}
    dist.all_reduce(expected["all_reduce"], group=gloo)
    collectives._all_gather(expected["all_gather"], x, group=gloo)
    whole = x.to(torch.float64, copy=True)
    dist.all_reduce(whole, group=gloo)
    expected["reduce_scatter"] = whole.chunk(size)[axis.rank]
    send = [1 + (axis.rank + other) % 3 for other in range(size)]  # the same seen from either side
    expected["all_to_all"] = x.new_empty(sum(send))
    dist.all_to_all_single(expected["all_to_all"], x[: sum(send)].clone(), send, send, group=gloo)
    summed = collectives.all_reduce_sum(ragged, axis)
    found = {
        "all_reduce": summed,
        "all_gather": collectives.all_gather(x, axis),
        "reduce_scatter": collectives.reduce_scatter_sum(x, axis),
        "all_to_all": collectives.exchange_rows(x[: sum(send)].clone(), axis, send, send),
    }
    found["in place"] = collectives.all_reduce_in_place(ragged.clone(), axis)
    expected["in place"] = expected["all_reduce"]
    assert torch.equal(found["in place"], summed)
    off = {name: float((found[name].double() - one.double()).abs().max() / 4) for name, one in expected.items()}
    return off, summed


@for_each("dtype", [torch.float64, torch.bfloat16], ids=str)
@for_each("number", [5, 20_000])  # one round, and two
@for_each("size", [2, 3, 4])
@for_each("has_links", [True, False], ids=["sockets", "gloo"])
def test_direct_messages_give_what_torchs_collectives_give(
    has_links: bool, size: int, number: int, dtype: torch.dtype, pools: Callable[[int], Pool]
) -> None:
    results = pools(size).run(_direct_and_torchs, size, number, dtype, has_links)
    for off, summed in results:
        assert max(off.values()) <= (1e-15 if dtype == torch.float64 else 2**-6), off
        assert torch.equal(summed, results[0][1])  # the same bits on every rank


def _open_files_of_meshes(number: int) -> list[int]:
    """How many files are open after each of `number` meshes that were used and are gone."""
    counts = []
    for _ in range(number):
        axis = open_mesh(Topology(tp=2)).tp
        collectives.all_reduce_sum(torch.ones(3), axis)
        assert direct.links_of(axis) is not None
        del axis
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    return counts


def test_sockets_close_with_their_mesh(pools: Callable[[int], Pool]) -> None:
    for counts in pools(2).run(_open_files_of_meshes, 5):
        assert len(set(counts)) == 1, counts


def _dispatched() -> list[str]:
    axis = open_mesh(Topology(tp=2)).tp

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "c10d" in func.name():
                seen.append(func.name().partition("::")[2])
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    x = torch.ones(4)
    with Names():
        collectives.all_reduce_sum(x, axis)
        collectives.all_gather(x, axis)
        collectives.reduce_scatter_sum(x, axis)
        collectives.exchange_rows(x, axis, [2, 2], [2, 2])
    return seen


def test_a_dispatch_mode_sees_each_as_one_collective(pools: Callable[[int], Pool]) -> None:
    """What counts collectives (the budget, verify, the planner's check) counts these, and not their messages."""
    expected = ["allreduce", "allgather_", "reducescatter_", "alltoall_"]
    assert pools(2).run(_dispatched) == [expected] * 2


def _order_of_gather() -> list[float]:
    axis = open_mesh(Topology(tp=4)).tp
    return collectives.all_gather(torch.full((1,), float(axis.rank)), axis).tolist()


def test_gather_is_in_rank_order(pools: Callable[[int], Pool]) -> None:
    assert pools(4).run(_order_of_gather) == [[0.0, 1.0, 2.0, 3.0]] * 4


def test_one_rank_needs_no_group() -> None:
    alone = Axis(1, 0, (0,), None)
    x = torch.arange(6.0).view(2, 3)
    for name in MOVEMENTS:
        assert torch.equal(getattr(collectives, name)(x, alone), x)


def _broadcast_in_place() -> tuple[bool, float]:
    axis = open_mesh(Topology(tp=2)).tp
    x = torch.full((3,), float(axis.rank + 5))
    pointer = x.data_ptr()
    collectives.broadcast_in_place(x, axis)
    return x.data_ptr() == pointer, float(x[0])


def test_broadcast_sends_from_and_receives_into_the_given_tensor(pools: Callable[[int], Pool]) -> None:
    assert pools(2).run(_broadcast_in_place) == [(True, 5.0)] * 2
