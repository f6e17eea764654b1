"""The messages of a step, by arithmetic from the plan: which collectives, over which axes, with how many bytes.

Owns: every collective of a micro-batch and of a step, its bytes and the links that it takes. Does not own: the numbers
of calls without bytes, which `plan.budget` derives by itself (a test compares), how long they take (`hardware`).

Bytes are what one rank puts in: of an all-gather its own part, of all else the whole tensor. What goes over a link is
less or more, by the number of ranks (`Message.wire_bytes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from meshlora.layers.head.loss import CHUNK_BYTES
from meshlora.plan.layout import Split
from meshlora.plan.rules import ModelPlan
from meshlora.plan.topology import DATA, DENSE_AXES, EP, ETP, FEATURES, Topology
from meshlora.planner.fake import Call
from meshlora.planner.hardware import Hardware
from meshlora.planner.kinds import Shrunk
from meshlora.planner.memory import States


@dataclass(frozen=True)
class Message:
    """One kind of collective of a step.

    Attributes:
        phase: forward, loss, backward or step. kind: as `plan.budget` names them. axes: over which ranks.
        num_bytes: that one rank puts in. calls: of one micro-batch; of a step where phase is step.
        layer: the kind of decoder layer that it belongs to; None outside them.
        is_ahead: whether it is sent before its layer runs: its time is not that of one message after another
            (`planner.gathers`).
    """

    phase: str
    kind: str
    axes: frozenset[str]
    num_bytes: int
    calls: int = 1
    layer: int | None = None
    is_ahead: bool = False

    def wire_bytes(self, ranks: int) -> float:
        """What one rank sends over its link, by a ring or by pairs."""
        share = (ranks - 1) / ranks
        return {
            "allreduce": 2 * share * self.num_bytes,
            "allgather": (ranks - 1) * self.num_bytes,
            "reducescatter": share * self.num_bytes,
            "alltoall": share * self.num_bytes,
        }[self.kind]


@dataclass(frozen=True)
class Flow:
    """What only a run of a layer shows: where gradients flow, and what routers choose.

    Attributes:
        reached: in the shrunk model, names of modules whose input carries a gradient; of row-parallel linears and
            whole regions whose output does.
        top_k: experts module -> how many experts a token goes to. weight_bytes: of one routing weight.
        is_trained_before: whether what comes before the first layer carries a gradient.
    """

    reached: frozenset[str]
    top_k: Mapping[str, int] = field(default_factory=dict)
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    is_trained_before: bool = False


@dataclass(frozen=True)
class Sizes:
    """Of a micro-batch: rows (sequences), tokens in each, trained tokens in all; of the model: width, vocabulary."""

    rows: int
    tokens_per_row: int
    width: int
    vocab: int
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        """Of the micro-batch."""
        return self.rows * self.tokens_per_row

    @property
    def token_bytes(self) -> int:
        """Of one token of the residual stream."""
        return self.width * self.dtype.itemsize


def messages_of(
    shrunk: Shrunk,
    plan: ModelPlan,
    flow: Flow,
    sizes: Sizes,
    states: States,
    *,
    ranks: Mapping[str, int],
    scaled: Iterable[str] = (),
) -> list[Message]:
    """All of a step that has one micro-batch, with calls of the whole model.

    plan: of the shrunk model. ranks: target -> r of its A. scaled: row-parallel linears with DoRA.
    """
    found = [
        *_of_regions(plan, flow, sizes, ranks, set(scaled)),
        *_of_ends(plan, flow, sizes),
        *_of_experts(plan, flow, sizes),
    ]
    counted = [
        message if message.layer is None else replace(message, calls=message.calls * shrunk.order.count(message.layer))
        for message in (_in_layer(shrunk, name, message) for name, message in found)
    ]
    every = [*counted, *_of_step(plan.topology, states)]
    return [m for m in every if plan.topology.size_over(m.axes) > 1 and m.calls]


def _in_layer(shrunk: Shrunk, name: str, message: Message) -> Message:
    return replace(message, layer=shrunk.kind_of(name))


def _of_regions(
    plan: ModelPlan, flow: Flow, sizes: Sizes, ranks: Mapping[str, int], scaled: set[str]
) -> Iterator[tuple[str, Message]]:
    """Borders of regions, row-parallel linears, norms over a split width."""
    topology, tokens = plan.topology, sizes.tokens
    if topology.is_whole:
        return
    item = sizes.dtype.itemsize
    own = tokens // topology.tp
    for region in plan.regions:
        is_reached = region.name in flow.reached
        width = sizes.width
        if is_reached:  # what rides along
            width += sum(ranks.get(n, 0) for n in plan.riders(region) if plan.linears[n].in_features == sizes.width)
        width *= item
        if topology.sp:
            yield region.name, Message("forward", "allgather", FEATURES, own * width)
            if is_reached:
                back = ("reducescatter", tokens * width) if region.is_split else ("allgather", own * width)
                yield region.name, Message("backward", back[0], FEATURES, back[1])
        elif region.is_split and is_reached:
            yield region.name, Message("backward", "allreduce", FEATURES, tokens * width)
    for name, rule in plan.linears.items():
        if rule.split is not Split.ROW:
            continue
        width = rule.out_features * item
        yield name, Message("forward", "reducescatter" if topology.sp else "allreduce", FEATURES, tokens * width)
        if topology.sp and name in flow.reached:
            yield name, Message("backward", "allgather", FEATURES, own * width)
        if name in scaled:
            yield name, Message("forward", "allreduce", FEATURES, rule.out_features * 4)
    for name in plan.wide_norms:
        yield name, Message("forward", "allreduce", FEATURES, tokens * 4)
        if name in flow.reached:
            yield name, Message("backward", "allreduce", FEATURES, tokens * 4)


def _of_ends(plan: ModelPlan, flow: Flow, sizes: Sizes) -> Iterator[tuple[str, Message]]:
    """The embedding, where sp cuts and joins, what comes after the layers, the loss."""
    topology, tokens, each = plan.topology, sizes.tokens, sizes.token_bytes
    if topology.is_whole:
        return
    yield "", Message("forward", "allreduce", FEATURES, tokens * each)
    if topology.sp:
        yield "", Message("forward", "allgather", FEATURES, tokens // topology.tp * each)
        yield "", Message("backward", "reducescatter", FEATURES, tokens * each)
        if flow.is_trained_before:
            yield "", Message("backward", "allgather", FEATURES, tokens // topology.tp * each)
    else:
        yield "", Message("backward", "allreduce", FEATURES, tokens * each)
    exact = 8 if sizes.dtype == torch.float64 else 4
    chunk = max(1, CHUNK_BYTES // (sizes.vocab * exact))
    whole, last = divmod(tokens, chunk)
    if whole:
        yield "", Message("loss", "allgather", FEATURES, 4 * chunk * exact, whole)
    if last:
        yield "", Message("loss", "allgather", FEATURES, 4 * last * exact)


def _of_experts(plan: ModelPlan, flow: Flow, sizes: Sizes) -> Iterator[tuple[str, Message]]:
    """Rows go to experts and come back, in either direction; counts before. Every expert has as many rows."""
    topology = plan.topology
    block, ep, etp = map(frozenset, ({EP, ETP}, {EP}, {ETP}))
    tokens = -(-sizes.tokens // topology.tp)
    for name, rule in plan.experts.items():
        rows = tokens * flow.top_k[name]
        is_reached = name in flow.reached
        if topology.ep * topology.etp > 1:
            yield name, Message("forward", "allgather", block, rule.num_experts * 8)
        over, copies = (ep, 1) if topology.two_stage else (block, topology.etp)
        for phase in ("forward", "backward") if is_reached else ("forward",):
            yield name, Message(phase, "alltoall", over, rows * copies * sizes.token_bytes, 2)
            if topology.two_stage:
                yield name, Message(phase, "allgather", etp, rows * sizes.token_bytes)
                yield name, Message(phase, "reducescatter", etp, rows * topology.etp * sizes.token_bytes)
        if topology.tp > 1 and not topology.sp:
            yield name, Message("forward", "allgather", FEATURES, tokens * sizes.token_bytes)
            if is_reached:
                each = sizes.token_bytes + flow.top_k[name] * flow.weight_bytes[name]
                yield name, Message("backward", "allgather", FEATURES, tokens * each)


def _of_step(topology: Topology, states: States) -> Iterator[Message]:
    """Gradients by the axes that they are summed over, the count of tokens (int64), the norm (fp64)."""
    yield Message("step", "allreduce", DATA, 8)
    yield Message("step", "allreduce", frozenset(DENSE_AXES), 8)
    for (axes, mean_axes), num_bytes in states.buckets.items():
        yield Message("step", "allreduce", axes | mean_axes, num_bytes)


def repeated(messages: Iterable[Message], order: Sequence[int], recomputed: Sequence[bool]) -> list[Message]:
    """With those that recomputation adds: the forward of a layer runs once more in its backward.

    order: the kind of each layer. recomputed: whether it computes its activations twice. The backward of a layer that
    dp_shard shards gathers it in any case, and no second time.
    """
    found = list(messages)
    again = Counter(kind for kind, twice in zip(order, recomputed, strict=True) if twice)
    for message in found[:]:
        if message.is_ahead:
            continue
        if message.phase == "forward" and message.layer is not None and again[message.layer]:
            calls = message.calls // order.count(message.layer) * again[message.layer]
            found.append(replace(message, phase="backward", calls=calls))
    return found


def calls_of(messages: Iterable[Message], topology: Topology, *, micro_batches: int = 1) -> Counter[Call]:
    """As a counter at dispatch level would see them, over `micro_batches` of a step; without those of no ranks."""
    found: Counter[Call] = Counter()
    for message in messages:
        times = 1 if message.phase == "step" else micro_batches
        call = Call(message.phase, message.kind, topology.size_over(message.axes), message.num_bytes)
        found[call] += message.calls * times
    return found


def span_of(topology: Topology, axes: frozenset[str]) -> int:
    """How far apart the ranks of a group over `axes` lie, the first and the last included."""
    return 1 + sum((topology.size_over({axis}) - 1) * topology.stride_of(axis) for axis in axes)


@dataclass(frozen=True)
class Traffic:
    """What the messages of a step take of one kind of link: calls, bytes that one rank sends, seconds of those that
    nothing runs beside.
    """

    calls: int = 0
    wire_bytes: float = 0.0
    time_s: float = 0.0


def traffic_of(
    messages: Iterable[Message], topology: Topology, gpu: Hardware, *, micro_batches: int
) -> dict[str, Traffic]:
    """`node` and `network` -> what a step sends there. A group that leaves a node is counted as network altogether."""
    found = {"node": Traffic(), "network": Traffic()}
    for message in messages:
        ranks = topology.size_over(message.axes)
        is_network = gpu.crosses_nodes(span_of(topology, message.axes))
        calls = message.calls * (1 if message.phase == "step" else micro_batches)
        wire = message.wire_bytes(ranks)
        time_s = gpu.message_s(wire, ranks=ranks, is_network=is_network)
        link = "network" if is_network else "node"
        time_s = 0.0 if message.is_ahead else time_s
        before = found[link]
        found[link] = Traffic(before.calls + calls, before.wire_bytes + calls * wire, before.time_s + calls * time_s)
    return found


def grouped(messages: Iterable[Message], *, micro_batches: int) -> dict[str, int]:
    """Collectives of a step: those of layers, of what is before and after them with the loss, of buckets, and two
    scalars: the count of tokens and the norm.

    What comes after the last layer is entered as a region is, and that one is counted with those of layers: it stands
    for the first region's, below which nothing is trained, so that no gradient is summed there.
    """
    found = {"layers": 0, "ends": 0, "buckets": 0, "scalars": 0}
    for message in messages:
        if message.phase == "step":
            found["scalars" if message.num_bytes == 8 else "buckets"] += message.calls
        else:
            is_end = message.layer is None and message.phase != "backward"
            found["ends" if is_end else "layers"] += message.calls * micro_batches
    return found
