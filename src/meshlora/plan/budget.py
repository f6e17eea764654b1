"""The messages of a step, by arithmetic from the plan: which collectives, over which axes, with how many bytes.

Owns: every collective of a micro-batch and its bytes; the numbers of calls that `docs/parallelism.md` derives. Does not
own: counting what a run really does (`oracle.capture`); the links that messages take, and how long (`planner`).

Bytes are what one rank puts in: of an all-gather its own part, of all else the whole tensor. What goes over a link is
less or more, by the number of ranks (`Message.wire_bytes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from meshlora.plan.grads import FactorRule
from meshlora.plan.layout import Split
from meshlora.plan.rules import ModelPlan
from meshlora.plan.topology import DATA, EP, ETP, FEATURES

# Of a model's forwards with gradients, and of those without: how many compare the tokens of tp ranks.
COMPARED_FORWARDS = 2

Named = Iterator[tuple[str, "Message"]]


@dataclass(frozen=True)
class Message:
    """One kind of collective of a step.

    Attributes:
        phase: forward, loss, backward or step. axes: over which ranks.
        num_bytes: that one rank puts in. calls: of one micro-batch; of a step where phase is step.
        layer: the kind of decoder layer that it belongs to; None outside them.
        is_ahead: whether it is sent before its layer runs: its time is not that of one message after another.
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
        reached: names of modules whose input carries a gradient; of row-parallel linears and whole regions whose output
            does.
        top_k: experts module -> how many experts a token goes to. weight_bytes: of one routing weight.
        is_trained_before: whether what comes before the first layer carries a gradient.
    """

    reached: frozenset[str]
    top_k: Mapping[str, int] = field(default_factory=dict)
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    is_trained_before: bool = False

    @classmethod
    def everywhere(cls, plan: ModelPlan) -> Flow:
        """Every module has a gradient to pass on."""
        names = {*(region.name for region in plan.regions), *plan.linears, *plan.wide_norms, *plan.experts}
        ones = dict.fromkeys(plan.experts, 1)
        return cls(frozenset(names), ones, ones, True)


@dataclass(frozen=True)
class Sizes:
    """Of a micro-batch: its tokens, and how many pass the head at once (a chunk); of the residual stream: its width."""

    tokens: int = 1
    chunk_tokens: int = 1
    width: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def token_bytes(self) -> int:
        """Of one token of the residual stream."""
        return self.width * self.dtype.itemsize


def micro_batch_messages(
    plan: ModelPlan, flow: Flow, sizes: Sizes, *, ranks: Mapping[str, int], scaled: Collection[str]
) -> Named:
    """(the module it is of, message) of the forward, the loss and the backward, but for `gathers`.

    A split region costs one collective where it is entered, and each of its row-parallel linears one, in either
    direction; a whole region under sp one gather. The embedding is summed once. The residual stream is cut once under
    sp; what follows the last layer is entered as a region is, and left by the loss: one gather a chunk of tokens. A
    norm over a split width takes a small sum in either direction. Experts: see `_of_experts`.

    ranks: target -> r of its A. scaled: row-parallel linears with DoRA, each of which needs the norms of its rows.
    """
    if not plan.topology.is_whole:
        yield from _of_regions(plan, flow, sizes, ranks)
        yield from _of_leaves(plan, flow, sizes, scaled)
        yield from _of_ends(plan, flow, sizes)
    yield from _of_experts(plan, flow, sizes)


def gathers(plan: ModelPlan, shards: Sequence[int]) -> Named:
    """Of a micro-batch under dp_shard: each decoder layer is gathered over dp before its forward and its backward.

    A layer that is computed twice is not gathered a third time: its gather comes before its second forward.

    shards: bytes of this rank's part of each unit.
    """
    for unit, num_bytes in zip(plan.units, shards, strict=True):
        for phase in ("forward", "backward") if num_bytes else ():
            yield unit, Message(phase, "allgather", DATA, num_bytes, is_ahead=True)


def _of_regions(plan: ModelPlan, flow: Flow, sizes: Sizes, ranks: Mapping[str, int]) -> Named:
    """Where regions are entered, and whole ones left."""
    topology, tokens = plan.topology, sizes.tokens
    own = tokens // topology.tp
    for region in plan.regions:
        is_reached = region.name in flow.reached
        width = sizes.width
        if is_reached:  # what rides along
            width += sum(ranks.get(n, 0) for n in plan.riders(region) if plan.linears[n].in_features == sizes.width)
        width *= sizes.dtype.itemsize
        if topology.sp:
            yield region.name, Message("forward", "allgather", FEATURES, own * width)
            if is_reached:
                back = ("reducescatter", tokens * width) if region.is_split else ("allgather", own * width)
                yield region.name, Message("backward", back[0], FEATURES, back[1])
        elif region.is_split and is_reached:
            yield region.name, Message("backward", "allreduce", FEATURES, tokens * width)


def _of_leaves(plan: ModelPlan, flow: Flow, sizes: Sizes, scaled: Collection[str]) -> Named:
    """Row-parallel linears, norms over a split width."""
    topology, tokens = plan.topology, sizes.tokens
    for name, rule in plan.linears.items():
        if rule.split is not Split.ROW:
            continue
        width = rule.out_features * sizes.dtype.itemsize
        yield name, Message("forward", "reducescatter" if topology.sp else "allreduce", FEATURES, tokens * width)
        if topology.sp and name in flow.reached:
            yield name, Message("backward", "allgather", FEATURES, tokens // topology.tp * width)
        if name in scaled:
            yield name, Message("forward", "allreduce", FEATURES, rule.out_features * 4)
    for name in plan.wide_norms:
        for phase in ("forward", "backward") if name in flow.reached else ("forward",):
            yield name, Message(phase, "allreduce", FEATURES, tokens * 4)


def _of_ends(plan: ModelPlan, flow: Flow, sizes: Sizes) -> Named:
    """The embedding, where sp cuts and joins, what comes after the layers, the loss."""
    topology, tokens, each = plan.topology, sizes.tokens, sizes.token_bytes
    yield "", Message("forward", "allreduce", FEATURES, tokens * each)
    if topology.sp:
        yield "", Message("forward", "allgather", FEATURES, tokens // topology.tp * each)
        yield "", Message("backward", "reducescatter", FEATURES, tokens * each)
        if flow.is_trained_before:
            yield "", Message("backward", "allgather", FEATURES, tokens // topology.tp * each)
    else:
        yield "", Message("backward", "allreduce", FEATURES, tokens * each)
    exact = 8 if sizes.dtype == torch.float64 else 4
    whole, last = divmod(tokens, sizes.chunk_tokens)
    yield "", Message("loss", "allgather", FEATURES, 4 * sizes.chunk_tokens * exact, whole)
    if last:
        yield "", Message("loss", "allgather", FEATURES, 4 * last * exact)


def _of_experts(plan: ModelPlan, flow: Flow, sizes: Sizes) -> Named:
    """Of all layers' experts, with or without LoRA on them: rows go there and come back, in either direction.

    The forward tells besides how many. On two stages each way has a gather or a reduce-scatter more; without sp each
    direction has a gather over tp, as every tp rank sends its share of the tokens. Every expert has as many rows.
    """
    topology = plan.topology
    block, ep, etp = map(frozenset, ({EP, ETP}, {EP}, {ETP}))
    shares = topology.tp > 1 and not topology.sp
    tokens = -(-sizes.tokens // topology.tp)
    for name, rule in plan.experts.items():
        rows = tokens * flow.top_k[name]
        is_reached = name in flow.reached
        yield name, Message("forward", "allgather", block, rule.num_experts * 8)
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


def micro_batch_budget(plan: ModelPlan, *, scaled_rows: int = 0, recomputes: bool = False) -> Counter[tuple[str, str]]:
    """(phase, kind) -> the most calls in one micro-batch, of one chunk of tokens.

    scaled_rows: row-parallel linears with DoRA.
    recomputes: the backward runs the layers' forward once more: all but the sum of the embedding and what follows the
    last layer, and gathers that it has in any case.
    """
    rows = 0 if plan.topology.is_whole else scaled_rows
    found = Counter({("forward", "allreduce"): rows, ("backward", "allreduce"): rows * recomputes})
    messages = micro_batch_messages(plan, Flow.everywhere(plan), Sizes(), ranks={}, scaled=())
    for module, message in (*messages, *gathers(plan, [1] * len(plan.units))):
        if plan.topology.size_over(message.axes) == 1:
            continue
        found[message.phase, message.kind] += message.calls
        if recomputes and module and message.phase == "forward" and not message.is_ahead:
            found["backward", message.kind] += message.calls
    return +found


def first_forwards_budget(plan: ModelPlan, num_forwards: int) -> Counter[tuple[str, str]]:
    """Of the first forwards of a loaded model besides: what compares their tokens over tp."""
    compared = 0 if plan.topology.is_whole else min(num_forwards, COMPARED_FORWARDS)
    return Counter({("forward", "allgather"): compared})


def step_budget(plan: ModelPlan, factors: Iterable[FactorRule]) -> Counter[tuple[str, str]]:
    """Of one optimizer step besides: a bucket for each set of gradient axes that spans ranks, and the token count."""
    segments = [segment for rule in factors for segment in rule.segments(rank=0, size=plan.topology.tp)]
    buckets = {(s.grad_axes, s.mean_axes) for s in segments if plan.topology.size_over(s.grad_axes | s.mean_axes) > 1}
    return Counter({("step", "allreduce"): len(buckets) + (plan.topology.size_over(DATA) > 1)})
