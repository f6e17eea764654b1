"""Choosing a topology: a prediction for every proved one, ranked.

Owns: the candidate topologies, micro-batches and recomputation options, the time of a step, the ranking. Does not own:
the parts of a prediction (`memory`, `communication`, `trace`, `hardware`), output (`planner.show`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshlora.comm.groups import simulated_job
from meshlora.common.errors import UserError
from meshlora.common.float64 import wide_dtype
from meshlora.loading.blueprint import Blueprint
from meshlora.plan.budget import Message, Sizes
from meshlora.plan.families.proved import check_proved
from meshlora.plan.stages import check_options
from meshlora.plan.topology import DATA, TOKENS, TP, Topology, dense_sizes, divisors
from meshlora.planner.communication import Traffic, messages_of, span_of, traffic_of
from meshlora.planner.fake import Work
from meshlora.planner.hardware import Hardware
from meshlora.planner.memory import Peak, States, peak_of, states_of
from meshlora.planner.problem import Problem, Recompute
from meshlora.planner.trace import Trace, model_vocab, tokens_of_chunk, trace

Traces = dict[Topology, tuple[Trace, Trace]]
RECOMPUTE: tuple[Recompute, ...] = ("none", 4, 2, "full")
# How many meshes of experts are looked at with cp: all, on 64 GPUs, would be thousands of topologies.
_MESHES = 3
# Eager kernels per gradient: copies into and out of its bucket, scaling, squaring in fp64, clipping.
_KERNELS_OF_A_GRADIENT = 10
# Memory traffic of AdamW and these kernels, in passes over the gradients.
_PASSES_OF_A_STEP = 16


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of running one topology in one way.

    Attributes:
        micro_batch: sequences per dp rank and micro-batch. micro_batches: per step. tokens: per sequence, padded to a
            multiple that cp and sp can split.
        messages: including those of recomputation. traffic: link -> totals of a step.
        chunk_bytes: local logits of one chunk of the loss.
        parts_s: seconds of each part of a step. The parts run one after another: only gathers of sharded weights
            overlap with kernels, and count with their exposed time.
    """

    topology: Topology
    micro_batch: int
    micro_batches: int
    tokens: int
    recompute: Recompute
    states: States
    peak: Peak
    chunk_bytes: int
    messages: tuple[Message, ...]
    traffic: Mapping[str, Traffic]
    parts_s: Mapping[str, float]
    usable_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Peak bytes."""
        return self.states.kept + self.peak.largest

    @property
    def fits(self) -> bool:
        """Whether the peak fits on a GPU."""
        return self.memory_bytes <= self.usable_bytes

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
    """Predict and rank `topologies`, by default all: with cp on the meshes of experts that are the fastest without, and
    with a ring those that do not fit without.

    Raises:
        UserError: no topology can be predicted.
    """
    found: list[Prediction] = []
    left_out: list[tuple[str, str]] = []
    traces: Traces = {}

    def look_at(waiting: Iterable[Topology]) -> None:
        for topology in waiting:
            try:
                found.append(predict(problem, topology, traces))
            except UserError as error:
                if len(topologies) == 1:
                    raise
                left_out.append((str(topology), error.rule.replace(str(topology), "this")))  # said once for all

    with simulated_job(2):
        if topologies:
            look_at(topologies)
        else:
            every = list(all_topologies(problem))
            look_at(topology for topology in every if not _is_cut(topology))
            meshes = list(dict.fromkeys(_experts_of(p.topology) for p in _ranked(found)))[:_MESHES]
            look_at(t for t in every if _is_cut(t) and (not meshes or _experts_of(t) in meshes))
            # A ring sends more, and holds fewer keys and values.
            tight = [prediction.topology for prediction in found if not prediction.fits]
            look_at(dataclasses.replace(topology, ring=True) for topology in tight if _is_cut(topology))
    if not found:
        name, why = left_out[0]
        raise UserError(f"{problem.gpus} GPUs", f"none of the topologies can be; {name}: {why}", "change --gpus")
    return Choice(tuple(_ranked(found)), tuple(left_out))


def _ranked(found: Iterable[Prediction]) -> list[Prediction]:
    return sorted(found, key=lambda p: (not p.fits, p.time_s if p.fits else p.memory_bytes))


def _is_cut(topology: Topology) -> bool:
    """Whether tokens of a sequence are on several ranks inside attention."""
    return topology.size_over(TOKENS) > 1


def _experts_of(topology: Topology) -> tuple[int, int, bool]:
    return topology.ep, topology.etp, topology.two_stage


def all_topologies(problem: Problem) -> Iterator[Topology]:
    """Every shape of both meshes, each with the base replicated and, if ranks have different tokens, sharded over
    them.
    """
    for shape in _shapes(problem):
        yield shape
        if shape.size_over(DATA) > 1:
            yield dataclasses.replace(shape, dp_shard=True)


def _shapes(problem: Problem) -> Iterator[Topology]:
    """Every shape of both meshes. etp stays inside a node, as tokens go to all etp ranks of an expert."""
    experts = [
        m.shape[0] for n, m in problem.shrunk.model.named_parameters() if n.endswith(".down_proj") and m.ndim == 3
    ]
    for dense in dense_sizes(problem.gpus):
        for sp in (False, True) if dense[TP] > 1 else (False,):
            if not experts:
                yield Topology(**dense, sp=sp)
                continue
            sizes = itertools.product(divisors(experts[0]), divisors(problem.gpu.gpus_per_node))
            for ep, etp in sizes:
                if problem.gpus % (ep * etp) == 0:
                    yield Topology(**dense, sp=sp, ep=ep, etp=etp)
                    if etp > 1 and ep > 1:
                        yield Topology(**dense, sp=sp, ep=ep, etp=etp, two_stage=True)


def predict(problem: Problem, topology: Topology, traces: Traces) -> Prediction:
    """The best way to run `topology`: the fastest that fits, else the one with the lowest peak.

    traces: cache by topology without dp_shard; this topology's are added.

    Raises:
        UserError: the model cannot be split so, or there are fewer sequences than dp ranks. UnsupportedError: unproved.
    """
    check_options(topology, {"a prediction": True})
    share = -(-problem.global_batch // topology.dp)
    if topology.dp > problem.global_batch:
        raise UserError(
            f"--global-batch {problem.global_batch}", f"each of the dp={topology.dp} ranks needs a sequence of its own"
        )
    small = problem.small.on(topology)
    check_proved(small.plan.model_type, topology, has_experts=bool(small.plan.experts))
    small = small.with_adapter(problem.lora)
    states = states_of(problem.shrunk, small)
    cut = topology.size_over(topology.token_cut)
    tokens = -(-problem.seq // cut) * cut
    whole = dataclasses.replace(topology, dp_shard=False)
    if whole not in traces:
        one, two = (trace(small, rows=n, tokens=tokens) for n in (1, 2))
        traces[whole] = one, two
    predictions = [
        _prediction(problem, small, states, traces[whole], rows, tokens, recompute)
        for rows in _micro_batches(problem, share)
        for recompute in _recomputations(problem)
    ]
    fitting = [prediction for prediction in predictions if prediction.fits]
    if fitting:
        return min(fitting, key=lambda p: p.time_s)
    return min(predictions, key=lambda p: p.memory_bytes)


def _micro_batches(problem: Problem, share: int) -> list[int]:
    """Powers of two up to the sequences of a dp rank, and that number itself."""
    if problem.micro_batch is not None:
        return [min(problem.micro_batch, share)]
    return sorted({2**n for n in range(share.bit_length()) if 2**n <= share} | {share})


def _recomputations(problem: Problem) -> list[Recompute]:
    if problem.recompute is not None:
        return [problem.recompute]
    most = len(problem.shrunk.order)
    return [r for r in RECOMPUTE if r == "none" or (problem.can_recompute and (isinstance(r, str) or r < most))]


def recomputed_layers(recompute: Recompute, number: int) -> tuple[bool, ...]:
    """Whether each of `number` layers is recomputed: none, full, or layers 0, n, 2n, ..."""
    if isinstance(recompute, int):
        return tuple(index % recompute == 0 for index in range(number))
    return (recompute == "full",) * number


def _compute_s(
    problem: Problem, traces: tuple[Trace, Trace], rows: int, own: int
) -> tuple[float, dict[int, float], dict[int, float]]:
    """Seconds of a micro-batch's kernels; kind -> seconds of a layer's forward; kind -> of its backward.

    own: the tokens of a sequence that a rank has.
    """
    gpu, order, two = problem.gpu, problem.shrunk.order, traces[1]

    def seconds(part: str) -> float:
        """Of one run of a part with `rows` sequences, linear in their number."""
        times = [gpu.work_s(t.work.get(part, Counter()), is_half=problem.is_half) for t in traces]
        return times[0] + (rows - 1) * (times[1] - times[0])

    per_kind = Counter(order)
    compute_s = sum(seconds(part) for part in ("before", "after", "back"))
    # The larger of the two traced chunks stands for all of them.
    chunk_s = gpu.work_s(two.work["chunk"], is_half=problem.is_half) / two.memory.chunk_tokens
    compute_s += chunk_s * rows * own
    forward_s = {k: seconds(f"layer {k}") for k in per_kind}
    backward_s = {k: seconds(f"layer {k} back") for k in per_kind}
    compute_s += sum(n * (forward_s[k] + backward_s[k]) for k, n in per_kind.items())
    return compute_s, forward_s, backward_s


def _prediction(
    problem: Problem,
    small: Blueprint,
    states: States,
    traces: tuple[Trace, Trace],
    rows: int,
    tokens: int,
    recompute: Recompute,
) -> Prediction:
    shrunk, gpu, dtype, (one, two) = problem.shrunk, problem.gpu, problem.blueprint.dtype, traces
    topology = small.topology
    micro_batches = -(-problem.global_batch // (topology.dp * rows))
    recomputed, shards = recomputed_layers(recompute, len(shrunk.order)), topology.size_over(DATA)
    vocab, width = model_vocab(problem.model), problem.model.get_input_embeddings().embedding_dim
    own = tokens // topology.size_over(TOKENS)
    chunk_tokens = tokens_of_chunk(vocab, dtype, rows * own)
    memory = one.memory.at(two.memory, rows, chunk_tokens)
    peak = peak_of(memory, shrunk.order, states, recomputed=recomputed, accumulates=micro_batches > 1, dp=shards)
    sizes = Sizes(rows * tokens, chunk_tokens, width, dtype)
    messages = messages_of(shrunk, small, one.flow, sizes, states, recomputed=recomputed)
    compute_s, forward_s, backward_s = _compute_s(problem, traces, rows, own)
    twice = Counter(kind for kind, again in zip(shrunk.order, recomputed, strict=True) if again)
    gather_s = gathers_s(
        messages,
        shrunk.order,
        recomputed,
        gpu,
        topology=topology,
        forward_s=forward_s,
        backward_s=backward_s,
    )
    update = {
        Work(0, _PASSES_OF_A_STEP * states.gradients): 1,
        Work(0, 0): _KERNELS_OF_A_GRADIENT * states.parameters,
    }
    traffic = traffic_of(messages, topology, gpu, micro_batches=micro_batches)
    columns = -(-vocab // topology.tp)
    return Prediction(
        topology,
        rows,
        micro_batches,
        tokens,
        recompute,
        states,
        peak,
        chunk_tokens * columns * (wide_dtype(dtype).itemsize + dtype.itemsize),
        tuple(messages),
        traffic,
        {
            "compute": micro_batches * compute_s,
            "recomputation": micro_batches * sum(n * forward_s[k] for k, n in twice.items()),
            "gathers of weights": micro_batches * gather_s,
            "messages inside nodes": traffic["node"].time_s,
            "messages between nodes": traffic["network"].time_s,
            "update": gpu.work_s(update, is_half=False),
        },
        gpu.usable_bytes,
    )


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
    ranks, is_network = topology.size_over(DATA), gpu.crosses_nodes(span_of(topology, DATA))
    gathered = [m for m in messages if m.is_ahead]
    if not gathered:
        return 0.0
    each = {
        m.layer: gpu.message_s(m.wire_bytes(ranks), ranks=ranks, is_network=is_network)
        for m in gathered
        if m.phase == "forward"
    }
    backward = [backward_s[k] + again * forward_s[k] for k, again in zip(order, recomputed, strict=True)]
    total = 0.0
    directions = [([*order], [forward_s[k] for k in order]), ([*reversed(order)], backward[::-1])]
    for kinds, kernels_s in directions:
        hidden_s = [0.0, *(gpu.overlap_efficiency * s for s in kernels_s[:-1])]
        total += sum(max(0.0, each.get(k, 0.0) - s) for k, s in zip(kinds, hidden_s, strict=True))
    # Into the gather's buffer, and out of it into the matrices' own memory: read and written.
    copies: Counter[Work] = Counter()
    for message in gathered:
        for parts in (1, ranks):
            copies[Work(0, 2 * message.num_bytes * parts)] += message.calls
    return total + gpu.work_s(copies, is_half=False)
