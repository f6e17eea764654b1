"""Stages of a pipeline in the planner: what of the model a pp rank has, and how long its ranks wait for each other.

Owns: the cut of the shrunk model, the turns of a rank, the time of a step's micro-batches over all ranks. Does not own:
the rule of the cut (`wings.stages.cut`), the order of turns (`wings.stages.pipeline_schedule`), the time and the
memory of one turn (`meshlora_extra.planner.choose`, `meshlora_extra.planner.memory`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshlora.plan.rules import ModelPlan
from meshlora.wings.stages import cut
from meshlora.wings.stages.pipeline_schedule import one_forward_one_backward
from meshlora_extra.planner.kinds import Shrunk
from meshlora_ground.topology import LAYERS, Topology

Turn = tuple[int, int, bool]


@dataclass(frozen=True)
class Stage:
    """One stage of a rank. start, stop: its layers among those of the rank, in their order."""

    start: int
    stop: int
    is_first: bool = True
    is_last: bool = True


@dataclass(frozen=True)
class PartOfModel:
    """What a pp rank has.

    Attributes:
        shrunk: with the kinds of its own layers. plan: of the shrunk model, for this rank. layers: their numbers.
        stages: its own, in order.
    """

    shrunk: Shrunk
    plan: ModelPlan
    layers: tuple[int, ...]
    stages: tuple[Stage, ...]


def parts_of(model: Any, shrunk: Shrunk, plan: ModelPlan) -> list[PartOfModel]:
    """Of all pp ranks. plan: without stages. Raises: UserError: too few layers. UnsupportedError: it is not proved."""
    order, topology = shrunk.order, plan.topology
    number = topology.num_stages
    if number == 1:
        return [PartOfModel(shrunk, plan, tuple(range(len(order))), (Stage(0, len(order)),))]  # one stage of all
    cut.check_stages(model, dataclasses.replace(plan, num_layers=len(order)))
    # Of one layer of each kind.
    costs = {kind: cut.layer_cost(shrunk.model, plan, f"{plan.layers}.{kind}") for kind in {*order}}
    after = cut.layer_cost(shrunk.model, plan, plan.head)
    first, last = cut.featured_layers(model.config), cut.first_sharing_layer(model.config)
    cuts = cut.cut_layers(tuple(costs[kind] for kind in order), number, after=after, first=first, last=last)
    cut.check_shared(model, dataclasses.replace(plan, stages=cuts))
    size = topology.size_over(LAYERS)
    found = []
    for rank in range(size):
        of_rank = dataclasses.replace(plan, stages=cuts, pp_rank=rank)
        layers: list[int] = []  # with interleave those of several stages
        stages: list[Stage] = []
        for stage in of_rank.own_stages:
            begin = len(layers)
            layers += range(*cuts[stage])
            stages.append(Stage(begin, len(layers), stage == 0, stage == number - 1))
        elsewhere = []
        if not of_rank.has_first_stage:
            elsewhere += [plan.embedding, *cut.beside_text(model, plan)]
        if not of_rank.has_last_stage:
            elsewhere += [*plan.after, plan.head]
        # What is elsewhere counts no times.
        own = dataclasses.replace(shrunk, order=tuple(order[i] for i in layers), elsewhere=frozenset(elsewhere))
        found.append(PartOfModel(own, of_rank, tuple(layers), tuple(stages)))
    return found


def shown_micro_batches(topology: Topology, micro_batches: int) -> int:
    """So many, of all of a step, that a rank has as many of them in memory at once as ever, and its order repeats."""
    if topology.num_stages == 1:
        return 1
    return min(micro_batches, 2 * topology.size_over(LAYERS))  # the first fill the pipeline, the second repeat


def turns_of(topology: Topology, rank: int, micro_batches: int) -> Iterator[Turn]:
    """(micro-batch, place among the rank's own stages, whether it is its forward), in order."""
    size = topology.size_over(LAYERS)
    for number, stage, is_forward in one_forward_one_backward(
        micro_batches, rank=rank, size=size, interleave=topology.interleave
    ):
        yield number, stage // size, is_forward


def time_of_all(
    topology: Topology, turn_s: Sequence[Sequence[tuple[float, float]]], hop_s: float, micro_batches: int
) -> float:
    """Seconds until the last rank has finished all micro-batches.

    turn_s: rank -> (forward, backward) seconds of each of its stages. hop_s: from one stage to the next. Of many
    micro-batches the first rounds are run, and the others take as long as the last of these: exact for one stage a
    rank, and where interleaved stages are unequal less than 1 % too short.
    """
    size = topology.size_over(LAYERS)
    some = 16 * size  # micro-batches that are simulated
    if micro_batches <= some + size:
        return _run(topology, turn_s, hop_s, micro_batches)
    less = _run(topology, turn_s, hop_s, some)
    more = _run(topology, turn_s, hop_s, some + size)
    return more + (micro_batches - some - size) * (more - less) / size


def _run(
    topology: Topology, turn_s: Sequence[Sequence[tuple[float, float]]], hop_s: float, micro_batches: int
) -> float:
    size, last = topology.size_over(LAYERS), topology.num_stages - 1
    waiting = [list(turns_of(topology, rank, micro_batches)) for rank in range(size)]
    done: dict[Turn, float] = {}
    now, place = [0.0] * size, [0] * size
    while len(done) < sum(map(len, waiting)):
        number_done = len(done)
        for rank in range(size):
            while place[rank] < len(waiting[rank]):
                number, own, is_forward = waiting[rank][place[rank]]
                stage = own * size + rank  # stages go round the ranks
                assert is_forward or (number, stage, True) in done, "a backward comes before its forward"
                before = stage - 1 if is_forward else stage + 1
                ready = 0.0
                if 0 <= before <= last:
                    if (number, before, is_forward) not in done:
                        break  # it waits for another rank's turn
                    ready = done[number, before, is_forward] + hop_s
                now[rank] = max(now[rank], ready) + turn_s[rank][own][int(not is_forward)]
                done[number, stage, is_forward] = now[rank]
                place[rank] += 1
        assert len(done) > number_done, "a stage waits forever"
    return max(now)
