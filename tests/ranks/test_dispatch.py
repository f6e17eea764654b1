"""Rows reach their experts in one order on every route, and come back where they started; backward is the adjoint."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import Mesh, open_mesh
from meshlora.wings.experts.dispatch import Journey, Places, Slots
from meshlora_ground.topology import Topology
from meshlora_judge.capture import CollectiveCounter
from tests.for_each import for_each
from tests.pool import Pool

NUM_EXPERTS, WIDTH = 8, 3
FLAT = ["dp=4,ep=2", "dp=4,ep=4", "dp=4,etp=2", "dp=4,etp=4", "dp=4,ep=2,etp=2"]
TWO_STAGE = ["dp=4,etp=2,two-stage", "dp=4,etp=4,two-stage", "dp=4,ep=2,etp=2,two-stage"]
ROUTES = FLAT + TWO_STAGE


def _draw(rank: int, num_tokens: int, experts: list[int], k: int = 2) -> Tensor:
    """`[num_tokens, k]`: each token chooses k different ones of `experts`."""
    generator = torch.Generator().manual_seed(100 + rank)
    rows = [torch.randperm(len(experts), generator=generator)[:k] for _ in range(num_tokens)]
    return torch.tensor(experts)[torch.stack(rows)] if rows else torch.empty(0, k, dtype=torch.int64)


# What the tokens of a rank choose.
CHOICES: dict[str, Callable[[int], Tensor]] = {
    "ranks differ": lambda rank: _draw(rank, 5 + 3 * rank, list(range(NUM_EXPERTS))),
    "some ranks have no rows": lambda rank: _draw(rank, 9 * (rank % 2), list(range(NUM_EXPERTS))),
    "one rank alone has rows": lambda rank: _draw(rank, 7 * (rank == 2), list(range(NUM_EXPERTS))),
    "nobody has rows": lambda rank: _draw(rank, 0, [0, 1]),
    "one expert takes all": lambda rank: torch.full((4 + rank, 1), 5),
    "experts without rows": lambda rank: _draw(rank, 6, [0, 2, 3, 7]),
    "one rank's experts take all": lambda rank: _draw(rank, 6, [0, 1], k=1),
    "three choices": lambda rank: _draw(rank, 4 + rank, list(range(NUM_EXPERTS)), k=3),
}


@functools.cache
def _mesh(topology: str) -> Mesh:
    return open_mesh(Topology.parse(topology), has_experts=True)


def _journey(topology: str, choice: str) -> tuple[Mesh, Slots, Journey]:
    mesh = _mesh(topology)
    slots = Slots.of(CHOICES[choice](mesh.rank), NUM_EXPERTS)
    return mesh, slots, Journey(slots, mesh)


def _random(number: int, seed: int) -> Tensor:
    return torch.randn(number, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _by_slot(rank: int, choice: str) -> list[tuple[int, int, int]]:
    """(rank, slot, expert) of every choice of a rank, in the order in which it makes them."""
    return [(rank, slot, expert) for slot, expert in enumerate(CHOICES[choice](rank).flatten().tolist())]


def _experts_of(rank: int, topology: Topology) -> range:
    each = NUM_EXPERTS // topology.ep
    return range(rank // topology.etp % topology.ep * each, (rank // topology.etp % topology.ep + 1) * each)


def _expected(rank: int, topology: Topology, choice: str) -> list[tuple[int, int, int]]:
    """The rows at a rank's experts: by expert, then by the rank they come from, then as they were chosen there."""
    size = topology.ep * topology.etp
    sources = range(rank // size * size, rank // size * size + size)
    every = [row for source in sources for row in _by_slot(source, choice)]
    return [row for expert in _experts_of(rank, topology) for row in every if row[2] == expert]


def _arrived(topology: str, choice: str) -> tuple[list[tuple[int, ...]], list[int]]:
    """(rows in their order by expert, counts), each row marked with where it comes from."""
    mesh, _, journey = _journey(topology, choice)
    rows = sorted(_by_slot(mesh.rank, choice), key=lambda row: row[2])  # Python's sort is stable too
    arrived = journey.there(torch.tensor(rows, dtype=torch.float64).view(-1, 3))
    at_experts = journey.by_expert.spread(arrived)
    return [tuple(map(int, row)) for row in at_experts.tolist()], journey.counts


@for_each("choice", CHOICES)
@for_each("topology", ROUTES)
def test_rows_at_an_expert_lie_by_source_then_token_whatever_the_route(
    topology: str, choice: str, pools: Callable[[int], Pool]
) -> None:
    shape = Topology.parse(topology)
    for rank, (rows, counts) in enumerate(pools(4).run(_arrived, topology, choice)):
        assert rows == _expected(rank, shape, choice)
        found = Counter(expert for _, _, expert in rows)
        assert counts == [found[expert] for expert in _experts_of(rank, shape)]


def _round_trip(topology: str, choice: str) -> tuple[Tensor, Tensor]:
    """(rows, what comes home if rank k of etp multiplies them by k + 2)."""
    mesh, slots, journey = _journey(topology, choice)
    rows = _random(slots.counts.num_rows, mesh.rank)
    return rows, journey.back(journey.there(rows) * (mesh.over({"etp"}).rank + 2))


@for_each("choice", CHOICES)
@for_each("topology", ROUTES)
def test_a_row_comes_home_as_the_sum_of_its_terms_over_etp(
    topology: str, choice: str, pools: Callable[[int], Pool]
) -> None:
    etp = Topology.parse(topology).etp
    terms = sum(range(2, etp + 2))
    for rows, home in pools(4).run(_round_trip, topology, choice):
        torch.testing.assert_close(home, rows * terms, rtol=1e-15, atol=0)


@dataclass(frozen=True)
class _Products:
    """<f(x), y> and <x, f*(y)> over all ranks."""

    forward: float
    backward: float


def _adjoint(topology: str, choice: str) -> dict[str, _Products]:
    mesh, slots, journey = _journey(topology, choice)
    home, away = slots.counts.num_rows, sum(journey.counts)
    found = {}
    for name, move, number_in in (("there", journey.there, home), ("back", journey.back, away)):
        x = _random(number_in, 10 + mesh.rank).requires_grad_()
        out = move(x)
        y = _random(len(out), 20 + mesh.rank)
        out.backward(y)
        assert x.grad is not None
        local = torch.stack([(out.detach() * y).sum(), (x.detach() * x.grad).sum()])
        found[name] = _Products(*all_reduce_sum(local, mesh.world).tolist())
    return found


@for_each("choice", CHOICES)
@for_each("topology", ROUTES)
def test_backward_of_each_way_is_its_adjoint(topology: str, choice: str, pools: Callable[[int], Pool]) -> None:
    for found in pools(4).run(_adjoint, topology, choice):
        for products in found.values():
            assert products.forward == pytest.approx(products.backward, rel=1e-13)


def _count(topology: str, choice: str) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """(calls, bytes sent) by phase and kind."""
    mesh = _mesh(topology)
    index = CHOICES[choice](mesh.rank)
    counter = CollectiveCounter()
    with counter:
        counter.phase = "forward"
        slots = Slots.of(index, NUM_EXPERTS)
        rows = _random(index.numel(), mesh.rank).requires_grad_()
        journey = Journey(slots, mesh)
        home = journey.back(journey.there(rows))
        counter.phase = "backward"
        home.sum().backward()
    return dict(counter.counts), dict(counter.sent)


@for_each("choice", ["ranks differ", "one rank alone has rows", "nobody has rows"])
@for_each("topology", ROUTES)
def test_a_journey_costs_the_collectives_of_its_route_on_every_rank(
    topology: str, choice: str, pools: Callable[[int], Pool]
) -> None:
    shape = Topology.parse(topology)
    each = {"alltoall": 2}
    if shape.two_stage:
        each = {"allgather": 1, "reducescatter": 1} | ({"alltoall": 2} if shape.ep > 1 else {})
    counts = Counter(each) + Counter({"allgather": 1})
    expected = {("forward", kind): n for kind, n in counts.items()} | {
        ("backward", kind): n for kind, n in each.items()
    }
    for found, _ in pools(4).run(_count, topology, choice):
        assert found == expected


@pytest.mark.parametrize("topology", FLAT)
def test_only_rows_and_counts_travel(topology: str, pools: Callable[[int], Pool]) -> None:
    shape = Topology.parse(topology)
    choice = "ranks differ"
    for rank, (_, sent) in enumerate(pools(4).run(_count, topology, choice)):
        rows = len(_by_slot(rank, choice)) * shape.etp
        arrived = len(_expected(rank, shape, choice))
        assert sent["forward", "allgather"] == 8 * NUM_EXPERTS
        # The counter takes the larger of what a rank puts in and what it gets, there and back.
        assert sent["forward", "alltoall"] == sent["backward", "alltoall"] == 2 * 8 * WIDTH * max(rows, arrived)


def test_sum_over_the_places_of_a_row_is_in_their_order() -> None:
    """Near to the limits of float64 a sum in another order is another number."""
    places = Places(torch.tensor([0, 0, 0]), torch.tensor([[2, 1, 0]]))
    rows = torch.tensor([[1.0], [2.0**-53], [2.0**-53]], dtype=torch.float64)
    assert places.collect(rows).item() == (2.0**-53 + 2.0**-53) + 1.0
    assert places.collect(rows).item() != (1.0 + 2.0**-53) + 2.0**-53


def test_slots_are_sorted_stably_and_find_their_way_back() -> None:
    index = torch.tensor([[3, 1], [1, 3], [1, 0]])
    slots = Slots.of(index, 4)
    assert slots.counts.on_host == [1, 3, 0, 2]
    tokens = torch.arange(3.0).unsqueeze(1)
    assert slots.rows(tokens).flatten().tolist() == [2, 0, 1, 2, 0, 1]
    weights = torch.tensor([[1.0, 10.0], [100.0, 1000.0], [1e4, 1e5]])
    ones = slots.weighted_sum(torch.ones(6, 1), weights)
    assert ones.flatten().tolist() == [11.0, 1100.0, 110000.0]
    marked = slots.weighted_sum(torch.tensor([[0.0], [1], [1], [1], [3], [3]]), weights)  # the number of its expert
    assert marked.flatten().tolist() == [13.0, 3100.0, 10000.0]


def _weighted(seed: int) -> tuple[Slots, Tensor, Tensor]:
    slots = Slots.of(_draw(seed, 6, list(range(4))), 4)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(12, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
    return slots, rows, torch.rand(6, 2, dtype=torch.float64, generator=generator).requires_grad_()


def test_gradients_of_the_weighted_sum_are_those_of_autograd() -> None:
    slots, rows, weights = _weighted(0)
    torch.autograd.gradcheck(lambda y, w: slots.weighted_sum(y, w), (rows, weights))
    torch.autograd.gradcheck(slots.places.collect, (rows,))
    tokens = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(slots.rows, (tokens,))
