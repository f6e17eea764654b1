"""Choosing a topology: a prediction for every proved one, ranked.

Owns: the candidate topologies, micro-batches and recomputation options, the time of a step, the ranking. Does not own:
the parts of a prediction (`memory`, `communication`, `trace`, `hardware`), output (`meshlora_extra.planner.show`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshlora.comm.groups import simulated_job
from meshlora.loading.blueprint import Blueprint
from meshlora.plan.derive import num_streams
from meshlora.verify.budget import Flow, Message, Sizes
from meshlora.wings.proved.families import check_proved
from meshlora.wings.stages.cut import check_tied, idle
from meshlora_extra.planner.communication import Traffic, hop_s, messages_of, span_of, traffic_of
from meshlora_extra.planner.fake import Work
from meshlora_extra.planner.hardware import Hardware
from meshlora_extra.planner.memory import Peak, Prologue, States, StepMemory, peak_of, states_of
from meshlora_extra.planner.pipeline import PartOfModel, parts_of, shown_micro_batches, time_of_all, turns_of
from meshlora_extra.planner.problem import Problem, Recompute
from meshlora_extra.planner.trace import Trace, model_vocab, tokens_of_chunk, trace
from meshlora_ground.errors import MeshloraError, UnsupportedError, UserError, reason
from meshlora_ground.float64 import wide_dtype
from meshlora_ground.topology import (
    DATA,
    FLAGS,
    LAYERS,
    NUMBERS,
    SEQUENCES,
    TOKENS,
    TP,
    Topology,
    dense_sizes,
    divisors,
    field_of,
)

# By what of a topology a trace depends on, of one sequence and of two.
Traces = dict[tuple[Any, ...], tuple[Trace, Trace]]
RECOMPUTE: tuple[Recompute, ...] = ("none", 4, 2, "full")
# How many meshes of experts are looked at with cp: all, on 64 GPUs, would be thousands of topologies.
_MESHES = 3
# Of how many of the best topologies without stages those with stages are made.
_STAGED = 6
# So many longer sizes of an axis that gain nothing end the search along it. Stages may have to be as many as nodes.
_TRIED = {TOKENS: 1, LAYERS: 2}
# Fields on which no trace of a micro-batch depends: how many ranks have other sequences and other layers.
_APART = SEQUENCES | LAYERS
_APART |= {field_of(name) for name, (axes, _) in (FLAGS | NUMBERS).items() if _APART & {*axes}}
# Copies into and out of buckets, scaling, norms, clipping, AdamW: each of all gradients at once.
_OPERATORS_OF_AN_UPDATE = 30
# Memory traffic of these, in passes over the gradients.
_PASSES_OF_A_STEP = 16


@dataclass(frozen=True)
class RankCost:
    """What one pp rank has and sends. messages: of a step with one micro-batch, including those of recomputation."""

    states: States
    peak: Peak
    messages: tuple[Message, ...]

    @property
    def memory_bytes(self) -> int:
        return self.states.kept + self.peak.largest


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of running one topology in one way.

    Attributes:
        micro_batch: sequences per dp rank and micro-batch. micro_batches: per step. tokens: per sequence, padded to a
            multiple that cp and sp can split.
        ranks: of each pp rank. traffic: link -> totals of a step, of the busiest of them.
        chunk_bytes: local logits of one chunk of the loss.
        parts_s: seconds of each part of a step, of the busiest pp rank. The parts run one after another: only gathers
            of sharded weights overlap with kernels, and count with their exposed time.
        usable_bytes: of a GPU. host_bytes: of inputs of layers on one machine. host_room: of its memory, 0: not known.
    """

    topology: Topology
    micro_batch: int
    micro_batches: int
    tokens: int
    recompute: Recompute
    ranks: tuple[RankCost, ...]
    chunk_bytes: int
    traffic: Mapping[str, Traffic]
    parts_s: Mapping[str, float]
    usable_bytes: int
    host_bytes: int
    host_room: int

    @property
    def fullest(self) -> RankCost:
        """The pp rank that needs the most memory, whose are states, peak, messages and memory_bytes."""
        return max(self.ranks, key=lambda rank: rank.memory_bytes)

    @property
    def states(self) -> States:
        return self.fullest.states

    @property
    def peak(self) -> Peak:
        return self.fullest.peak

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.fullest.messages

    @property
    def memory_bytes(self) -> int:
        return self.fullest.memory_bytes

    @property
    def fits(self) -> bool:
        has_host = not self.host_room or self.host_bytes <= self.host_room
        return has_host and self.memory_bytes <= self.usable_bytes

    @property
    def missing(self) -> str:
        """What is lacking, in words, where it does not fit."""
        if self.memory_bytes > self.usable_bytes:
            return f"{(self.memory_bytes - self.usable_bytes) / 1e9:,.1f} GB too much for each GPU"
        too_much = (self.host_bytes - self.host_room) / 1e9
        return f"inputs of layers are {too_much:,.1f} GB too much for the memory of a machine"

    @property
    def time_s(self) -> float:
        """Seconds of an optimizer step."""
        return sum(self.parts_s.values())

    def tokens_per_s(self, global_batch: int, seq: int) -> float:
        """Throughput of one GPU."""
        return global_batch * seq / self.time_s / self.topology.world


@dataclass(frozen=True)
class Choice:
    """All candidates. ranked: those that fit by time, then the others by memory. left_out: (topology, reason)."""

    ranked: tuple[Prediction, ...]
    left_out: tuple[tuple[str, str], ...]


def choose(problem: Problem, topologies: Sequence[Topology] = ()) -> Choice:
    """Predict and rank `topologies`, by default all: with cp on the meshes of experts that are the fastest without,
    and with a ring those that do not fit without. With pp those whose stages are a part of one of the best. Both are
    longer as long as that gains. With a tp group across nodes only if nothing else fits.

    Raises:
        UserError: no topology can be predicted.
    """
    found: list[Prediction] = []
    left_out: list[tuple[str, str]] = []
    errors: list[UserError] = []
    traces: Traces = {}

    def look_at(topology: Topology) -> None:
        try:
            found.append(predict(problem, topology, traces))
        except UserError as error:
            if len(topologies) == 1:
                raise
            errors.append(error)
            left_out.append((str(topology), error.rule.replace(str(topology), "this")))  # said once for all

    def look_through(every: Sequence[Topology]) -> None:
        cut = []
        for topology in every:
            if topology.size_over(TOKENS) > 1:  # tokens of a sequence are on several ranks inside attention
                cut.append(topology)
            else:
                look_at(topology)
        meshes = list(dict.fromkeys(_experts_of(p.topology) for p in _ranked(found)))[:_MESHES]
        for topology in cut:
            if (not meshes or _experts_of(topology) in meshes) and not _is_over(found, topology, TOKENS):
                look_at(topology)
        for p in found[:]:  # which grows below
            if p.topology.size_over(TOKENS) > 1 and p.states.kept <= p.usable_bytes < p.memory_bytes:
                look_at(dataclasses.replace(p.topology, ring=True))  # it sends more, and holds fewer keys and values
        staged: dict[Topology, None] = {}  # a set that keeps the order
        for p in _ranked(found)[:_STAGED]:
            staged |= dict.fromkeys(_in_stages(p.topology, problem))
        for topology in sorted(staged, key=lambda t: t.pp):
            if not _is_over(found, topology, LAYERS):  # asked in turn: it depends on what the shorter ones gained
                look_at(topology)

    with simulated_job(2):
        for topology in topologies:
            look_at(topology)
        if not topologies:
            every = sorted(all_topologies(problem), key=lambda topology: topology.cp)
            for crosses in (False, True):
                if not any(prediction.fits for prediction in found):
                    look_through([t for t in every if problem.gpu.crosses_nodes(t.tp) == crosses])
    if not found:
        if len({error.rule for error in errors}) == 1:  # it is none of the number of GPUs
            raise errors[0]
        name, why = left_out[0]
        raise UserError(f"{problem.gpus} GPUs", f"none of the topologies can be; {name}: {why}", "change --gpus")
    return Choice(tuple(_ranked(found)), tuple(left_out))


def _ranked(found: Iterable[Prediction]) -> list[Prediction]:
    def key(one: Prediction) -> tuple[bool, float]:
        if one.fits:
            return False, one.time_s
        return True, one.memory_bytes

    return sorted(found, key=key)


def _in_stages(topology: Topology, problem: Problem) -> Iterator[Topology]:
    """`topology` with each of its dense axes shorter and stages of layers in its place, one and two on a rank."""
    layers = len(problem.shrunk.order)
    for axis, size in topology.sizes.items():
        if axis in LAYERS:
            continue
        for stages in divisors(size):
            if not 1 < stages <= layers:
                continue
            ep = math.gcd(topology.ep, topology.world // stages // topology.etp)  # experts lie inside a stage
            shorter: dict[str, Any] = {axis: size // stages, "ep": ep, **_flags(topology, axis, size // stages)}
            try:
                staged = dataclasses.replace(topology, **shorter).with_stages(stages)
            except UserError:  # its mesh of experts does not fit into a stage
                continue
            plain = dataclasses.replace(staged, dp_shard=False)  # few layers may fit whole
            yield from (staged, plain)
            if 2 * stages <= layers:
                yield dataclasses.replace(plain, interleave=2)


def _flags(topology: Topology, axis: str, size: int) -> dict[str, bool]:
    """Those of `topology` without what means nothing where `axis` has the size `size`."""
    left, kept = topology.sizes | {axis: size}, {}
    for flag, (needs, _) in FLAGS.items():
        name = field_of(flag)
        # `sizes` has the dense axes alone: what needs etp is kept.
        kept[name] = getattr(topology, name) and any(left.get(need, 2) > 1 for need in needs)
    return kept


def _is_over(found: Iterable[Prediction], topology: Topology, axes: frozenset[str]) -> bool:
    """Whether longer `axes`, all else alike but dp, have stopped to gain; with cp, whether states alone do not fit."""
    own = _without(topology, axes | SEQUENCES)
    alike = [p for p in found if _without(p.topology, axes | SEQUENCES) == own]
    alike.sort(key=lambda p: p.topology.size_over(axes))
    if axes == TOKENS and any(p.states.kept > p.usable_bytes for p in alike):
        return True
    before, last = alike[: -_TRIED[axes]], alike[-_TRIED[axes] :]
    best_s = min((p.time_s for p in before if p.fits), default=math.inf)
    return best_s < math.inf and not any(p.fits and p.time_s < best_s for p in last)


def _without(topology: Topology, fields: frozenset[str]) -> tuple[Any, ...]:
    return tuple(value for name, value in vars(topology).items() if name not in fields)


def _experts_of(topology: Topology) -> tuple[int, int, bool]:
    return topology.ep, topology.etp, topology.two_stage


def all_topologies(problem: Problem) -> Iterator[Topology]:
    """Every shape of both meshes, each with the base replicated and, if ranks have different tokens, sharded over
    them.
    """
    meshes = list(_meshes_of_experts(problem))
    for dense in dense_sizes(problem.gpus):
        for sp in (False, True):
            if sp and dense[TP] == 1:
                continue
            for mesh in meshes:
                shape = Topology(**dense, sp=sp, **mesh)
                yield shape
                if shape.size_over(DATA) > 1:
                    yield dataclasses.replace(shape, dp_shard=True)


def _meshes_of_experts(problem: Problem) -> Iterator[dict[str, Any]]:
    """The fields of a topology that cut experts; none in a model without."""
    for name, parameter in problem.shrunk.model.named_parameters():
        if name.endswith(".down_proj") and parameter.ndim == 3:  # [E, ...]: of a linear it is a module
            break
    else:
        yield {}
        return
    # etp stays inside a node, as tokens go to all etp ranks of an expert.
    for ep, etp in itertools.product(divisors(len(parameter)), divisors(problem.gpu.gpus_per_node)):
        if problem.gpus % (ep * etp) == 0:
            yield {"ep": ep, "etp": etp}
            if etp > 1 and ep > 1:
                yield {"ep": ep, "etp": etp, "two_stage": True}


def predict(problem: Problem, topology: Topology, traces: Traces) -> Prediction:
    """The best way to run `topology`: the fastest that fits, else the one with the lowest peak.

    traces: cache; this topology's are added.

    Raises:
        UserError: the model cannot be split so, or there are fewer sequences than dp ranks. UnsupportedError: unproved.
    """
    share = -(-problem.global_batch // topology.dp)  # rounded up
    if topology.dp > problem.global_batch:
        rule = f"each of the dp={topology.dp} ranks needs a sequence of its own"
        raise UserError(f"--global-batch {problem.global_batch}", rule)
    small = problem.small.on(topology, has_stages=False)  # stages are cut from the plan below
    check_proved(small.plan.model_type, topology, has_experts=bool(small.plan.experts))
    small = small.with_adapter(problem.lora)
    parts = parts_of(problem.model, problem.shrunk, small.plan)
    check_tied(problem.model, small.plan, small.adapter.weights if small.adapter else ())
    states = []
    for part in parts:
        own = states_of(part.shrunk, small, problem.optimizer, problem.min_8bit_size)
        if not own.parameters:
            raise idle(topology, part.layers)
        states.append(own)
    cut = topology.size_over(topology.token_cut)
    tokens = -(-problem.seq // cut) * cut  # rounded up
    alike = topology.is_whole, *_without(topology, _APART)
    if alike not in traces:
        of = functools.partial(trace, small, tokens=tokens, device=problem.gpu.device, optimizer=problem.optimizer)
        try:
            traces[alike] = of(rows=1), of(rows=2)
        except MeshloraError:
            raise
        except Exception as error:  # code of a model, which may ask for what tensors without content have not
            rule = f"its step cannot be followed on tensors without content ({reason(error)})"
            way_out = "plan its --topology alone, which says how it is split"
            raise UnsupportedError(f"model_type {small.plan.model_type!r}", rule, way_out) from error
    predictions: list[Prediction] = []
    waiting = _micro_batches(problem, share)
    for recompute in _recomputations(problem):
        # More sequences at once need more memory, and those that fit take less time without more recomputation.
        while waiting:
            one = _prediction(problem, topology, small, parts, states, traces[alike], waiting[0], tokens, recompute)
            predictions.append(one)
            if not one.fits:
                break
            waiting = waiting[1:]
    return _ranked(predictions)[0]


def _micro_batches(problem: Problem, share: int) -> list[int]:
    """Powers of two up to the sequences of a dp rank, and that number itself."""
    if problem.micro_batch is not None:
        return [min(problem.micro_batch, share)]
    return sorted({2**n for n in range(share.bit_length())} | {share})


def _recomputations(problem: Problem) -> list[Recompute]:
    if problem.recompute is not None:
        return [problem.recompute]
    if not problem.can_recompute:
        return ["none"]
    # Each n-th of fewer layers than n is the first alone.
    return [r for r in RECOMPUTE if isinstance(r, str) or r < len(problem.shrunk.order)]


def recomputed_layers(recompute: Recompute, number: int) -> tuple[bool, ...]:
    """Whether each of `number` layers is recomputed: none, full, offload, or layers 0, n, 2n, ..."""
    if isinstance(recompute, int):
        return tuple(index % recompute == 0 for index in range(number))
    return (recompute != "none",) * number


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of a micro-batch's kernels: before the layers, after them with the loss, the backward of that, and kind
    -> of a layer's forward, of its backward.
    """

    before: float
    after: float
    back: float
    forward: Mapping[int, float]
    backward: Mapping[int, float]


def _kernel_times(problem: Problem, traces: tuple[Trace, Trace], rows: int, own: int, chunk_tokens: int) -> KernelTimes:
    """own: the tokens of a sequence that a rank has. chunk_tokens: those of a chunk of the loss."""
    gpu, two = problem.gpu, traces[1]

    def of_rows(first: float, second: float) -> float:
        return first + (rows - 1) * (second - first)  # from those of one sequence and of two

    def seconds(part: str) -> float:
        """Of one run of a part with `rows` sequences: device and host each linear in their number."""
        first, second = traces[0].work.get(part, Counter()), two.work.get(part, Counter())
        busy_s = of_rows(gpu.busy_s(first, is_half=problem.is_half), gpu.busy_s(second, is_half=problem.is_half))
        return max(busy_s, of_rows(gpu.launches_s(first), gpu.launches_s(second)))

    # The larger of the two traced chunks stands for all of them.
    chunk, tokens = two.work["chunk"], rows * own
    busy_s = gpu.busy_s(chunk, is_half=problem.is_half) * tokens / two.memory.chunk_tokens
    chunks_s = max(busy_s, gpu.launches_s(chunk) * -(-tokens // chunk_tokens))
    kinds = range(problem.shrunk.num_kinds)
    return KernelTimes(
        seconds("before"),
        seconds("after") + chunks_s,
        seconds("back"),
        {k: seconds(f"layer {k}") for k in kinds},
        {k: seconds(f"layer {k} back") for k in kinds},
    )


def _prediction(
    problem: Problem,
    topology: Topology,
    small: Blueprint,
    parts: Sequence[PartOfModel],
    states: Sequence[States],
    traces: tuple[Trace, Trace],
    rows: int,
    tokens: int,
    recompute: Recompute,
) -> Prediction:
    gpu, dtype, (one, two) = problem.gpu, problem.blueprint.dtype, traces
    micro_batches = _number_of_micro_batches(problem, topology, rows)
    again = recomputed_layers(recompute, len(problem.shrunk.order))
    vocab, width = model_vocab(problem.model), problem.model.get_input_embeddings().embedding_dim
    own = tokens // topology.size_over(TOKENS)
    chunk_tokens = tokens_of_chunk(vocab, dtype, rows * own, device=problem.gpu.device)
    memory = one.memory.at(two.memory, rows, chunk_tokens)
    sizes = Sizes(rows * tokens, chunk_tokens, width, dtype, num_streams(problem.model.config))
    kernels = _kernel_times(problem, traces, rows, own, chunk_tokens)
    ranks: list[RankCost] = []
    turns: list[TurnTimes] = []
    for number, (part, held) in enumerate(zip(parts, states, strict=True)):
        recomputed = [again[layer] for layer in part.layers]
        # Of the whole turn order.
        offloads = recompute == "offload"
        peak = _peak_of_rank(number, part, memory, one.flow, held, sizes, recomputed, micro_batches, offloads)
        of_rank = dataclasses.replace(small, plan=part.plan)
        messages = messages_of(part.shrunk, of_rank, one.flow, sizes, held, recomputed=recomputed)
        ranks.append(RankCost(held, peak, tuple(messages)))
        turns.append(_turn_times(problem, part, messages, kernels, recomputed))
    busiest = max(range(len(parts)), key=lambda number: turns[number].total_s)  # all wait for it
    traffic = traffic_of(ranks[busiest].messages, topology, gpu, micro_batches=micro_batches)
    # All bytes in one, and the launches of the rest.
    update = {Work(0, _PASSES_OF_A_STEP * states[busiest].gradients): 1, Work(0, 0): _OPERATORS_OF_AN_UPDATE}
    return Prediction(
        topology,
        rows,
        micro_batches,
        tokens,
        recompute,
        tuple(ranks),
        chunk_tokens * -(-vocab // topology.tp) * (wide_dtype(dtype).itemsize + dtype.itemsize),
        traffic,
        {
            **{name: micro_batches * seconds for name, seconds in turns[busiest].parts_s.items()},
            "messages inside nodes": traffic["node"].time_s,
            "messages between nodes": traffic["network"].time_s,
            "waiting for other stages": _waits_s(topology, gpu, ranks, turns, micro_batches),
            "waiting for the host": gpu.waits_s,
            "update": gpu.work_s(update, is_half=False),
        },
        gpu.usable_bytes,
        max(rank.peak.host for rank in ranks) * min(gpu.gpus_per_node, topology.world),
        int(1e9 * gpu.host_memory_gb),
    )


def _peak_of_rank(
    number: int,
    part: PartOfModel,
    memory: StepMemory,
    flow: Flow,
    states: States,
    sizes: Sizes,
    recomputed: Sequence[bool],
    micro_batches: int,
    offloads: bool,
) -> Peak:
    topology, stream = part.plan.topology, sizes.tokens * sizes.streams * sizes.token_bytes
    tables = (memory.before.end - stream) / topology.size_over(TOKENS)  # each rank has its own tokens'
    return peak_of(
        memory,
        part.shrunk.order,
        states,
        recomputed=recomputed,
        accumulates=micro_batches > 1,
        dp=topology.size_over(DATA),
        stages=part.stages,
        turns=list(turns_of(topology, number, shown_micro_batches(topology, micro_batches))),
        prologue=Prologue(stream, tables, flow.is_trained_before, offloads),
    )


def _number_of_micro_batches(problem: Problem, topology: Topology, rows: int) -> int:
    """Of a step. Where ranks have several stages the trainer makes a multiple of theirs."""
    multiple = 1
    if topology.interleave > 1:
        multiple = topology.size_over(LAYERS)
    return -(-problem.global_batch // (topology.dp * rows * multiple)) * multiple


def _waits_s(
    topology: Topology, gpu: Hardware, ranks: Sequence[RankCost], turns: Sequence[TurnTimes], micro_batches: int
) -> float:
    """Seconds of a step in which the busiest pp rank waits for others: the bubble, and what is handed on."""
    if len(ranks) == 1:
        return 0.0
    handed_on = max(message.num_bytes for message in ranks[0].messages if message.kind == "send")
    # With the bubble.
    whole_s = time_of_all(topology, [t.stages for t in turns], hop_s(topology, gpu, handed_on), micro_batches)
    return whole_s - micro_batches * max(t.total_s for t in turns)


@dataclass(frozen=True)
class TurnTimes:
    """Seconds of a micro-batch on a pp rank: forward and backward of each of its stages, messages among them, and the
    parts of their sum besides messages.
    """

    stages: tuple[tuple[float, float], ...]
    parts_s: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(map(sum, self.stages))


def _turn_times(
    problem: Problem, part: PartOfModel, messages: Sequence[Message], kernels: KernelTimes, recomputed: Sequence[bool]
) -> TurnTimes:
    """Messages and gathers count alike with each of the rank's stages; gathers half in either direction."""
    gpu, order, topology = problem.gpu, part.shrunk.order, part.plan.topology
    gather_s = gathers_s(
        messages, order, recomputed, gpu, topology=topology, forward_s=kernels.forward, backward_s=kernels.backward
    )

    def more_s(*phases: str) -> float:
        """For each stage: messages of these phases and half of the gathers."""
        sent = [m for m in messages if m.phase in phases]
        links = traffic_of(sent, topology, gpu, micro_batches=1).values()
        return (sum(link.time_s for link in links) + gather_s / 2) / len(part.stages)

    there_s, back_s = more_s("forward", "loss"), more_s("backward")
    found, total = [], {"compute": 0.0, "recomputation": 0.0, "gathers of weights": gather_s}
    for stage in part.stages:
        kinds = order[stage.start : stage.stop]
        repeated = itertools.compress(kinds, recomputed[stage.start : stage.stop])
        again_s = sum(kernels.forward[kind] for kind in repeated)
        forward_s = kernels.before + sum(kernels.forward[kind] for kind in kinds)
        backward_s = sum(kernels.backward[kind] for kind in kinds)
        if stage.is_last:
            forward_s += kernels.after
            backward_s += kernels.back
        total["compute"] += forward_s + backward_s
        total["recomputation"] += again_s
        found.append((forward_s + there_s, backward_s + again_s + back_s))
    return TurnTimes(tuple(found), total)


def gathers_s(
    messages: Sequence[Message],
    order: Sequence[int],
    recomputed: Sequence[bool],
    gpu: Hardware,
    *,
    topology: Topology,
    forward_s: Mapping[int, float],
    backward_s: Mapping[int, float],
) -> float:
    """Seconds that gathers of weights add to a micro-batch: their exposed time, and copies in and out.

    A layer is gathered before its forward and again before its backward, prefetched by one layer: torch runs the gather
    on a separate stream, overlapped with the kernels of the layer before it. The first gather in either direction has
    nothing to overlap with. Gathers are assumed to overlap with kernels only, not with other messages, and for a share
    of the kernels' time (`Hardware.overlap_efficiency`).

    order: the kind of each layer. forward_s, backward_s: kind -> time of its kernels; the backward of a recomputed
    layer includes both.
    """
    # Shards are gathered over all of it.
    ranks, is_network = topology.size_over(DATA), gpu.crosses_nodes(span_of(topology, DATA))
    gathered = [m for m in messages if m.is_ahead]
    if not gathered:
        return 0.0
    each_s: dict[int | None, float] = {}
    for message in gathered:
        if message.phase == "forward":
            wire_bytes = message.wire_bytes(ranks)
            each_s[message.layer] = gpu.message_s(wire_bytes, ranks=ranks, is_network=is_network)
    there, back = [], []  # (kind, time of its kernels) of each layer
    for kind, again in zip(order, recomputed, strict=True):
        there.append((kind, forward_s[kind]))
        back.append((kind, backward_s[kind] + again * forward_s[kind]))
    total = 0.0
    for layers in (there, back[::-1]):
        exposed_s, hidden_s = [], 0.0
        for kind, kernels_s in layers:
            exposed_s.append(max(0.0, each_s.get(kind, 0.0) - hidden_s))
            hidden_s = gpu.overlap_efficiency * kernels_s
        total += sum(exposed_s)
    # Into the gather's buffer, and out of it into the matrices' own memory: read and written.
    copies: Counter[Work] = Counter()
    for message in gathered:
        for parts in (1, ranks):
            copies[Work(0, 2 * message.num_bytes * parts)] += message.calls
    return total + gpu.work_s(copies, is_half=False)
