"""The messages of a whole model's step, their links and their times.

Owns: how often each message of `verify.budget` is sent, the messages at the end of a step, traffic per link. Does not
own: the messages of a micro-batch (`verify.budget`), the speed of links (`meshlora_extra.planner.hardware`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshlora.loading.blueprint import Blueprint
from meshlora.plan.layout import Split
from meshlora.verify.budget import Flow, Message, Sizes, gathers, micro_batch_messages
from meshlora_extra.planner.hardware import Hardware
from meshlora_extra.planner.kinds import Shrunk
from meshlora_extra.planner.memory import States
from meshlora_ground.topology import DATA, DENSE_AXES, LAYERS, Topology


def messages_of(
    shrunk: Shrunk, small: Blueprint, flow: Flow, sizes: Sizes, states: States, *, recomputed: Sequence[bool]
) -> list[Message]:
    """All messages of a step with one micro-batch, with the calls of the whole model, or of a pp rank.

    small: blueprint of the shrunk model with the adapter, with the plan of that rank.
    recomputed: whether each layer is recomputed, i.e. repeats its forward in its backward.
    """
    order, plan, targets = shrunk.order, small.plan, small.trained.targets
    ranks = {name: target.r * max(1, len(target.pieces)) for name, target in targets.items()}
    scaled = []
    for name, target in targets.items():
        if "magnitude" in target.further and (target.is_embedding or plan.linears[name].split is Split.ROW):
            scaled.append(name)
    twice = Counter[int | None](itertools.compress(order, recomputed))  # kind -> its layers that run again
    once, repeated = [], []
    for module, message in (
        *micro_batch_messages(plan, flow, sizes, ranks=ranks, scaled=scaled),
        *_of_step(states),
        *gathers(plan, states.shards),
    ):
        # Nobody to send to, or on another pp rank.
        if plan.topology.size_over(message.axes) == 1 or not shrunk.times(module):
            continue
        kind = shrunk.kind_of(module)  # None outside the layers
        once.append(replace(message, layer=kind, calls=message.calls * shrunk.times(module)))
        if twice[kind] and message.phase == "forward" and not message.is_ahead:
            again = message.calls * twice[kind]
            # A recomputed forward sends again, in the backward.
            repeated.append(replace(message, phase="backward", layer=kind, calls=again))
    return once + repeated


def _of_step(states: States) -> Iterator[tuple[str, Message]]:
    """Of no module: the token count, the gradient norm, and gradients by the axes that they are summed over."""
    yield "", Message("step", "allreduce", DATA, 8)  # int64
    yield "", Message("step", "allreduce", frozenset(DENSE_AXES), 8)  # fp64
    for (axes, mean_axes), num_bytes in states.buckets.items():
        yield "", Message("step", "allreduce", axes | mean_axes, num_bytes)


def ranks_of(message: Message, topology: Topology) -> int:
    """The number of ranks of its group: two of neighbouring stages, else all over its axes."""
    if message.kind in ("send", "receive"):
        return 2
    return topology.size_over(message.axes)


def hop_s(topology: Topology, gpu: Hardware, num_bytes: int) -> float:
    """Seconds of a message from a stage to the next, over the slowest link between any two of them."""
    is_network = gpu.crosses_nodes(span_of(topology, LAYERS))
    return gpu.message_s(num_bytes, ranks=2, is_network=is_network)  # from one rank to one


def span_of(topology: Topology, axes: frozenset[str]) -> int:
    """The number of consecutive ranks that a group over `axes` spans, first to last."""
    return 1 + sum((topology.size_over({axis}) - 1) * topology.stride_of(axis) for axis in axes)


@dataclass(frozen=True)
class Traffic:
    """Totals of a step's messages over one kind of link: calls, bytes sent by one rank, seconds of those that are not
    prefetched.
    """

    calls: int = 0
    wire_bytes: float = 0.0
    time_s: float = 0.0


def traffic_of(
    messages: Iterable[Message], topology: Topology, gpu: Hardware, *, micro_batches: int
) -> dict[str, Traffic]:
    """`node` and `network` -> traffic of a step. A group that spans nodes counts as network entirely, and so do all
    stages if any of them is on another node.

    What stages hand on takes no time here: it leaves while its sender computes, and who waits for it waits for a stage.
    """
    found = {"node": Traffic(), "network": Traffic()}
    for message in messages:
        ranks, is_handed_on = ranks_of(message, topology), message.kind in ("send", "receive")
        is_network = gpu.crosses_nodes(span_of(topology, message.axes))
        calls, link = message.calls, "node"
        if message.phase != "step":
            calls *= micro_batches
        if is_network:
            link = "network"
        wire = message.wire_bytes(ranks)
        time_s = gpu.message_s(wire, ranks=ranks, is_network=is_network)  # asked of all: it refuses unknown links
        if message.is_ahead or is_handed_on:
            time_s = 0.0
        before = found[link]
        found[link] = Traffic(before.calls + calls, before.wire_bytes + calls * wire, before.time_s + calls * time_s)
    return found


def grouped(messages: Iterable[Message], *, micro_batches: int) -> dict[str, int]:
    """Collectives of a step, counted by place: layers; ends (before and after the layers, and the loss); gradient
    buckets; two scalars, the token count and the norm; of several stages what they hand on, each way.

    The backward message at the entry of the modules after the last layer counts with the layers: it makes up for the
    first region, which sums no gradient, as nothing below it is trained.
    """
    found = {"layers": 0, "ends": 0, "buckets": 0, "scalars": 0}
    for message in messages:
        if message.kind in ("send", "receive"):
            found["stages"] = found.get("stages", 0) + message.calls * micro_batches
        elif message.phase == "step":
            found["scalars" if message.num_bytes == 8 else "buckets"] += message.calls  # the token count and the norm
        else:
            is_end = message.layer is None and message.phase != "backward"
            found["ends" if is_end else "layers"] += message.calls * micro_batches
    return found
