"""The messages (collectives) of a step, computed from the plan: kind, axes and bytes.

Owns: the call counts derived in `docs/parallelism.md`, too. Does not own: counting the calls of a real run
(`meshlora_judge.capture`), links and times (`planner`). Bytes are the input of one rank: its own part for an
all-gather, the whole tensor otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from meshlora.plan.grads import FactorRule
from meshlora.plan.layout import Split
from meshlora.plan.rules import ModelPlan
from meshlora.wings.context.mixing import CACHE, OFFSET
from meshlora_ground.float64 import wide_dtype
from meshlora_ground.topology import DATA, EP, ETP, FEATURES, LAYERS, TOKENS

Named = Iterator[tuple[str, "Message"]]


@dataclass(frozen=True)
class Message:
    """One kind of collective of a step.

    Attributes:
        phase: forward, loss, backward or step. axes: those of its group.
        num_bytes: input of one rank. calls: per micro-batch, or per step if phase is step.
        layer: the kind of its decoder layer; None outside the layers.
        is_ahead: whether it is prefetched before its layer runs, so that its time may be hidden.
        to_one: of an all-to-all, whether a rank sends all of it to one other.
    """

    phase: str
    kind: str
    axes: frozenset[str]
    num_bytes: int
    calls: int = 1
    layer: int | None = None
    is_ahead: bool = False
    to_one: bool = False

    def wire_bytes(self, ranks: int) -> float:
        """Bytes that one rank sends, with ring or pairwise algorithms."""
        share = (ranks - 1) / ranks
        return {
            "allreduce": 2 * share * self.num_bytes,
            "allgather": (ranks - 1) * self.num_bytes,
            "reducescatter": share * self.num_bytes,
            "alltoall": self.num_bytes if self.to_one else share * self.num_bytes,
            "send": self.num_bytes,
            "receive": 0,
        }[self.kind]


@dataclass(frozen=True)
class Flow:
    """Facts that only running a layer shows: where gradients flow, and how routers choose.

    Attributes:
        reached: modules whose input requires grad; for row-parallel linears and whole regions, whose output does; the
            embedding of second inputs, if these do.
        top_k: experts module -> experts per token. weight_bytes: experts module -> bytes of a routing weight.
        key_bytes: attention -> bytes of the key and value of a token, of the heads of a rank. keys_reached: attentions
            whose keys or values require grad, or under ring queries: the first layer's may, though its input does not.
        is_trained_before: whether the input of the first layer requires grad.
    """

    reached: frozenset[str]
    top_k: Mapping[str, int] = field(default_factory=dict)
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    key_bytes: Mapping[str, int] = field(default_factory=dict)
    keys_reached: frozenset[str] = frozenset()
    is_trained_before: bool = False

    @classmethod
    def everywhere(cls, plan: ModelPlan) -> Flow:
        """The flow in which gradients reach every module."""
        names = {region.name for region in plan.regions}
        names.update(plan.linears, plan.wide_norms, plan.experts, plan.per_layer[:1])
        ones = dict.fromkeys(plan.experts, 1)
        keys = dict.fromkeys(plan.attentions, 1)
        return cls(frozenset(names), ones, ones, keys, frozenset(keys), is_trained_before=True)


@dataclass(frozen=True)
class Sizes:
    """Tokens of a micro-batch, tokens per loss chunk, and the width and dtype of a residual stream, of so many."""

    tokens: int = 1
    chunk_tokens: int = 1
    width: int = 1
    dtype: torch.dtype = torch.float32
    streams: int = 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one residual stream."""
        return self.width * self.dtype.itemsize


def micro_batch_messages(
    plan: ModelPlan, flow: Flow, sizes: Sizes, *, ranks: Mapping[str, int], scaled: Collection[str]
) -> Named:
    """(module, message) pairs of the forward, loss and backward, except `gathers`.

    In either direction a split region costs one collective at its entry and one per row-parallel linear; a whole region
    under sp costs one gather. The embedding is summed once, and under sp the residual stream is scattered once. The
    modules after the last layer are entered like a region; the loss, which leaves it, takes one gather per chunk of
    tokens. A norm over a split width takes a small sum in either direction. Experts: see `_of_experts`.

    ranks: target -> r of its A. scaled: row-parallel linears, and a split
        embedding, with DoRA, which need the norms of their rows.
    """
    if not plan.topology.is_whole:
        yield from _of_regions(plan, flow, sizes, ranks)
        yield from _of_leaves(plan, flow, sizes, scaled)
        yield from _of_attentions(plan, flow, sizes)
        yield from _of_recurrent(plan)
        yield from _of_mixing(plan)
        yield from _of_ends(plan, flow, sizes)
        yield from _of_second_inputs(plan, flow, sizes)
        if plan.embedding in scaled and plan.has_first_stage:
            yield plan.embedding, Message("forward", "allreduce", FEATURES, sizes.width * 4)  # as of a row-parallel one
    yield from _of_experts(plan, flow, sizes)


def gathers(plan: ModelPlan, shards: Sequence[int]) -> Named:
    """Gathers of a micro-batch under dp_shard: each decoder layer is gathered before its forward and its backward.

    Recomputing a layer costs no third gather: its second forward runs after the gather of its backward.

    shards: bytes of this rank's shard of each unit.
    """
    for unit, num_bytes in zip(plan.units, shards, strict=True):
        if num_bytes:
            yield unit, Message("forward", "allgather", DATA, num_bytes, is_ahead=True)
            yield unit, Message("backward", "allgather", DATA, num_bytes, is_ahead=True)


def _own(plan: ModelPlan, sizes: Sizes) -> int:
    """The tokens of a micro-batch that a rank has in its layers, and its tp ranks have together."""
    return -(-sizes.tokens // plan.topology.size_over(TOKENS))


def _of_regions(plan: ModelPlan, flow: Flow, sizes: Sizes, ranks: Mapping[str, int]) -> Named:
    """Messages at the entry of regions and the exit of whole ones."""
    topology, tokens = plan.topology, _own(plan, sizes)
    own = tokens // topology.tp
    for region in plan.regions:
        is_reached = region.name in flow.reached
        width = sizes.width
        if is_reached:  # low-rank activations gathered with the input
            for rider in plan.riders(region):
                if plan.linears[rider].in_features == sizes.width:
                    width += ranks.get(rider, 0)
        width *= sizes.dtype.itemsize
        # An attention whose taps come from tokens has streams of keys and of values beside that of queries (inkling2).
        taps = {f"{region.name}.{name}.static_weight" for name in ("k_sconv", "k_proj.sconv")}
        for _ in range(3 if taps & plan.parameters.keys() else 1):
            if topology.sp:
                yield region.name, Message("forward", "allgather", FEATURES, own * width)
                if is_reached and region.is_split:
                    yield region.name, Message("backward", "reducescatter", FEATURES, tokens * width)
                elif is_reached:
                    yield region.name, Message("backward", "allgather", FEATURES, own * width)
            elif region.is_split and is_reached:
                yield region.name, Message("backward", "allreduce", FEATURES, tokens * width)


def _of_leaves(plan: ModelPlan, flow: Flow, sizes: Sizes, scaled: Collection[str]) -> Named:
    """Messages of row-parallel linears and of norms over a split width."""
    topology, tokens = plan.topology, _own(plan, sizes)
    for name, rule in plan.linears.items():
        if rule.split is not Split.ROW:
            continue
        width = rule.out_features * sizes.dtype.itemsize
        kind = "reducescatter" if topology.sp else "allreduce"
        yield name, Message("forward", kind, FEATURES, tokens * width)
        if topology.sp and name in flow.reached:
            yield name, Message("backward", "allgather", FEATURES, tokens // topology.tp * width)
        if name in scaled:
            yield name, Message("forward", "allreduce", FEATURES, rule.out_features * 4)  # norms are in float32
    for name in plan.wide_norms:
        yield name, Message("forward", "allreduce", plan.axes_of_norm(name), tokens * 4)
        if name in flow.reached:
            yield name, Message("backward", "allreduce", plan.axes_of_norm(name), tokens * 4)


def _of_attentions(plan: ModelPlan, flow: Flow, sizes: Sizes) -> Named:
    """Keys and values of all cp ranks, gathered together, and their gradients' way back.

    In a ring they are passed on from rank to rank, in the backward once more: alone, then with their gradients, which
    go one rank further alone.
    """
    size = plan.topology.size_over(TOKENS)
    for name in plan.attentions:
        whole, own = sizes.tokens * flow.key_bytes[name], _own(plan, sizes) * flow.key_bytes[name]
        if plan.topology.ring:
            yield name, Message("forward", "alltoall", TOKENS, own, size - 1, to_one=True)
            if name in flow.keys_reached:
                yield name, Message("backward", "alltoall", TOKENS, own, 2, to_one=True)
                for _ in range(size - 2):
                    yield name, Message("backward", "alltoall", TOKENS, 2 * own, to_one=True)
            continue
        yield name, Message("forward", "allgather", TOKENS, own)
        if name in flow.keys_reached:
            yield name, Message("backward", "reducescatter", TOKENS, whole)


def _of_recurrent(plan: ModelPlan) -> Named:
    """Recurrent mixers under cp: the inputs before a rank's tokens, and a state from rank to rank."""
    for name, state in plan.recurrent.items():
        yield name, Message("forward", "allgather", TOKENS, 1)
        yield name, Message("backward", "reducescatter", TOKENS, 1)
        if state:  # from each cp rank to the next
            calls = plan.topology.size_over(TOKENS) - 1
            yield name, Message("forward", "alltoall", TOKENS, 1, calls)
            yield name, Message("backward", "alltoall", TOKENS, 1, calls)


def _of_mixing(plan: ModelPlan) -> Named:
    """Keys from a cache, and those of an indexer, which have no gradient; or the input of what runs on whole rows."""
    for name, way in plan.mixing.items():
        if way != OFFSET:
            yield name, Message("forward", "allgather", TOKENS, 1, 2 if way == CACHE else 1)
            yield name, Message("backward", "reducescatter", TOKENS, 1)


def _of_ends(plan: ModelPlan, flow: Flow, sizes: Sizes) -> Named:
    """Messages of the embedding, sp's scatter and gather around the layers, the modules after them, and the loss."""
    topology, each = plan.topology, sizes.token_bytes
    tokens = _own(plan, sizes)
    yield from _of_stages(plan, tokens // (topology.tp if topology.sp else 1), sizes)
    if plan.has_first_stage:
        yield "", Message("forward", "allreduce", FEATURES, sizes.tokens * each)  # the embedding is of all tokens
        if topology.sp and flow.is_trained_before:
            yield "", Message("backward", "allgather", FEATURES, tokens // topology.tp * sizes.streams * each)
    if plan.encoder:  # it looks up tokens too, and each rank has a term of the gradient of its states
        yield "", Message("forward", "allreduce", FEATURES, sizes.tokens * each)
        yield "", Message("backward", "allreduce", FEATURES, sizes.tokens * each)
    if not plan.has_last_stage:
        return
    if topology.sp:
        yield "", Message("forward", "allgather", FEATURES, tokens // topology.tp * sizes.streams * each)
        yield "", Message("backward", "reducescatter", FEATURES, tokens * sizes.streams * each)
    else:
        yield "", Message("backward", "allreduce", FEATURES, tokens * sizes.streams * each)
    if not plan.has_vocabulary and topology.size_over(TOKENS) > 1:  # whose head takes whole texts
        yield "", Message("forward", "allgather", TOKENS, tokens * each)
        yield "", Message("backward", "reducescatter", TOKENS, sizes.tokens * each)
    exact = wide_dtype(sizes.dtype).itemsize  # four numbers of a token: see `ChunkLoss`
    whole, last = divmod(tokens, sizes.chunk_tokens)
    yield "", Message("loss", "allgather", FEATURES, 4 * sizes.chunk_tokens * exact, whole)
    if last:
        yield "", Message("loss", "allgather", FEATURES, 4 * last * exact)


def _of_second_inputs(plan: ModelPlan, flow: Flow, sizes: Sizes) -> Named:
    """The lookup of the layers' second inputs, and the gather of the gradient of each that sp cuts."""
    table, width = plan.per_layer
    if not table or not plan.has_first_stage:
        return
    each = width * sizes.dtype.itemsize
    yield "", Message("forward", "allreduce", FEATURES, sizes.tokens * each * plan.num_layers)
    if plan.topology.sp and table in flow.reached:
        own = _own(plan, sizes) // plan.topology.tp
        yield "", Message("backward", "allgather", FEATURES, own * each, plan.num_layers)


def _of_stages(plan: ModelPlan, tokens: int, sizes: Sizes) -> Named:
    """The residual stream from the stage before and to the next one, and its gradients' way back; beside it the states
    of blocks before, and the second inputs of all layers from there on. tokens: that a rank has between layers.
    """
    second = plan.per_layer[1] * sizes.dtype.itemsize
    for stage in plan.own_stages if plan.stages else ():
        first, stop = plan.stages[stage]
        end = plan.stages[-1][1]  # a planner's plan has fewer layers, one of each kind
        for kind, back, layer in (("receive", "send", first), ("send", "receive", stop)):
            if 0 < layer < end:
                streams = sizes.streams + (-(-layer // plan.states_every) if plan.states_every else 0)
                num_bytes = tokens * (streams * sizes.token_bytes + second * (end - layer))
                yield "", Message("forward", kind, LAYERS, num_bytes)
                yield "", Message("backward", back, LAYERS, num_bytes)


def _of_experts(plan: ModelPlan, flow: Flow, sizes: Sizes) -> Named:
    """Messages of routed experts, with or without LoRA on them: dispatch and combine, in either direction.

    The forward also exchanges row counts. Two-stage dispatch adds a gather and a reduce-scatter; without sp each
    direction adds a gather over tp, as each tp rank sends its share of the tokens. All experts get equally many rows.
    """
    topology = plan.topology
    block, ep, etp = map(frozenset, ({EP, ETP}, {EP}, {ETP}))
    shares = topology.tp > 1 and not topology.sp
    tokens = -(-_own(plan, sizes) // topology.tp)
    for name, rule in plan.experts.items():
        if name not in flow.top_k:  # of a tower, which gets no rows from text
            continue
        rows = tokens * flow.top_k[name]
        is_reached = name in flow.reached
        yield name, Message("forward", "allgather", block, rule.num_experts * 8)  # int64 counts of rows
        over, copies = (ep, 1) if topology.two_stage else (block, topology.etp)
        for phase in ("forward", "backward") if is_reached else ("forward",):
            yield name, Message(phase, "alltoall", over, rows * copies * sizes.token_bytes, 2)
            if topology.two_stage:
                yield name, Message(phase, "allgather", etp, rows * sizes.token_bytes)
                yield name, Message(phase, "reducescatter", etp, rows * topology.etp * sizes.token_bytes)
        if shares:
            yield name, Message("forward", "allgather", FEATURES, tokens * sizes.token_bytes)
            if is_reached:
                each = sizes.token_bytes + flow.top_k[name] * flow.weight_bytes[name]
                yield name, Message("backward", "allgather", FEATURES, tokens * each)


def micro_batch_budget(
    plan: ModelPlan, *, scaled_rows: int = 0, recomputes: bool = False, keeps_attention: bool = False
) -> Counter[tuple[str, str]]:
    """(phase, kind) -> the most calls in a micro-batch with one chunk of tokens.

    scaled_rows: number of row-parallel linears with DoRA.
    recomputes: whether the backward repeats the layers' forward collectives, other than gathers of weights.
    keeps_attention: a ring among these is attention's own, and not repeated.
    """
    rows = 0 if plan.topology.is_whole else scaled_rows
    found = Counter({("forward", "allreduce"): rows, ("backward", "allreduce"): rows * recomputes})
    messages = micro_batch_messages(plan, Flow.everywhere(plan), Sizes(), ranks={}, scaled=())
    passed_once = plan.attentions if plan.topology.ring and keeps_attention else ()
    for module, message in (*messages, *gathers(plan, [1] * len(plan.units))):
        if plan.topology.size_over(message.axes) == 1:
            continue
        found[message.phase, message.kind] += message.calls
        is_repeated = recomputes and module and module not in passed_once
        if is_repeated and message.phase == "forward" and not message.is_ahead:
            found["backward", message.kind] += message.calls
    return +found  # drops zeros


def first_forwards_budget(plan: ModelPlan, num_compared: int) -> Counter[tuple[str, str]]:
    """Additional calls of a loaded model's first forwards, `num_compared` of which compare their tokens over tp."""
    return Counter({("forward", "allgather"): 0 if plan.topology.is_whole else num_compared})


def step_budget(plan: ModelPlan, factors: Iterable[FactorRule]) -> Counter[tuple[str, str]]:
    """Additional calls of an optimizer step: a bucket per set of gradient axes that spans ranks, and the count."""
    buckets = set[tuple[frozenset[str], frozenset[str]]]()
    for rule in factors:
        for part in rule.parts(rank=0, size=plan.topology.tp):
            if plan.topology.size_over(part.grad_axes | part.mean_axes) > 1:
                buckets.add((part.grad_axes, part.mean_axes))
    return Counter({("step", "allreduce"): len(buckets) + (plan.topology.size_over(DATA) > 1)})
