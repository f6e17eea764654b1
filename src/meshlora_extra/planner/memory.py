"""Memory of a rank: its states (weights, adapter, gradients, moments), and the peak of a step.

Owns: the states of a rank (`states_of`), the tensors of its frozen base, whole, packed or sharded over dp (`held`), and
the peak over the parts of a step (`peak_of`). Does not own: the memory of one part (`meshlora_extra.planner.trace`),
which linears are packed (`wings.quantized.kinds`), which parameters are sharded (`plan.rules`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.plan import Trained
from meshlora.loading.blueprint import Blueprint
from meshlora.plan.layout import Split
from meshlora.plan.rules import ExpertRule, ModelPlan
from meshlora.run.optimizers import BLOCK, cuts_blocks, has_eight_bits, is_frozen
from meshlora.wings.quantized.float8_matrix import matrix_like
from meshlora.wings.quantized.kinds import BITS, COMPUTE, FACTOR_BYTES, WITH_ZEROS, local_blocks
from meshlora.wings.quantized.quantized import Form, Packed
from meshlora_extra.planner.kinds import Shrunk
from meshlora_extra.planner.pipeline import Stage, Turn
from meshlora_ground.float64 import wide_dtype
from meshlora_ground.topology import DATA

Axes = tuple[frozenset[str], frozenset[str]]


@dataclass(frozen=True)
class States:
    """Bytes on rank 0, which no rank exceeds.

    Attributes:
        weights: frozen base. shards: this rank's input to the gather of a layer of each kind; empty without dp_shard.
            buffers: those of the model. adapter: its parameters. gradients, moments: of those that are trained, with
            all else that the optimizer keeps.
        buckets: (grad axes, mean axes) -> bytes of gradients reduced over them. largest: of a trained parameter.
        parameters: number of trained parameters.
    """

    weights: int
    shards: tuple[int, ...]
    buffers: int
    adapter: int
    gradients: int
    moments: int
    buckets: Mapping[Axes, int]
    largest: int
    parameters: int

    @property
    def kept(self) -> int:
        """Bytes held between steps."""
        return self.weights + self.buffers + self.adapter + self.moments


def states_of(shrunk: Shrunk, small: Blueprint, optimizer: str = "adamw", min_8bit_size: int = 4096) -> States:
    """The states of the whole model, or of a pp rank. small: blueprint of the shrunk model with the adapter. optimizer,
    min_8bit_size: as in a run file.
    """
    model, plan = shrunk.model, small.plan
    weights, shards = _of_base(shrunk, plan, small.trained.targets)
    buffers = sum(
        shrunk.times(name) * math.prod(_local_shape(name, b.shape, plan, ())) * b.itemsize
        for name, b in model.named_buffers()
    )
    each = wide_dtype(model.dtype).itemsize
    buckets: Counter[Axes] = Counter()
    total, frozen, moments, largest, count = 0, 0, 0, 0, 0
    for name, trained in small.trained.parameters.items():
        times, local = shrunk.times(name), local_shape(trained, plan)
        if not times:
            continue
        number = math.prod(local)
        if is_frozen(name, optimizer):
            frozen += times * number
            moments += times * local[-2] ** 2 * each  # the correction of its B
            continue
        # Two, and what the optimizer adds.
        moments += times * _bytes_of_moments(trained, plan, optimizer, each, min_8bit_size)
        total += times * number
        largest, count = max(largest, number * each), count + times  # of one parameter, for the norm
        for segment in trained.rule.parts(rank=0, size=plan.topology.tp):
            part = list(local)
            stop = part[segment.dim] if segment.stop is None else segment.stop
            part[segment.dim] = stop - segment.start
            buckets[segment.grad_axes, segment.mean_axes] += times * math.prod(part) * each
    adapter = (total + frozen) * each
    return States(weights, shards, buffers, adapter, total * each, moments, buckets, largest, count)


def _bytes_of_moments(trained: Trained, plan: ModelPlan, optimizer: str, each: int, min_8bit_size: int) -> int:
    """What a rank keeps of one parameter besides its value and gradient. each: bytes of an element of it."""
    number = math.prod(local_shape(trained, plan))
    if optimizer == "adamw":
        return 2 * number * each + 4  # torch's AdamW keeps the step number, in fp32
    if optimizer != "adamw_8bit":
        return 2 * number * each
    if not has_eight_bits(trained.shape, min_8bit_size):
        return 2 * 4 * number  # small ones stay in fp32
    if cuts_blocks(trained, plan.topology):  # then each rank keeps those of the whole parameter
        number = math.prod(trained.shape)
    return 2 * (number + 4 * -(-number // BLOCK))  # a byte each, and an fp32 scale a block


def local_shape(trained: Trained, plan: ModelPlan) -> tuple[int, ...]:
    local = list(trained.shape)
    for cut in trained.rule.cuts:
        local[cut.dim] = cut.layout.local_size(plan.topology.size_over({cut.axis}))
    return tuple(local)


def _of_base(shrunk: Shrunk, plan: ModelPlan, targets: Collection[str]) -> tuple[int, tuple[int, ...]]:
    """`weights` and `shards` of `States`.

    torch's `fully_shard` splits dim 0 into equal parts and pads the last: every rank holds and sends as many rows as
    the largest part has.
    """
    weights, shards, counted = 0, [0] * shrunk.num_kinds, set[int]()
    for name, parameter in shrunk.model.named_parameters(remove_duplicate=False):
        if not shrunk.times(name) or id(parameter) in counted:  # a tied head may be on another rank
            continue
        counted.add(id(parameter))  # tied names share it
        for tensor in held(name, parameter.shape, parameter.dtype, plan, targets):
            num_bytes = tensor.nbytes
            if plan.is_sharded(name, ndim=tensor.ndim):
                kind = shrunk.kind_of(name)
                assert kind is not None, name
                num_bytes = -(-len(tensor) // plan.topology.size_over(DATA)) * tensor[0].nbytes
                shards[kind] += num_bytes
            weights += shrunk.times(name) * num_bytes
    return weights, tuple(shards) if plan.units else ()


def held(
    name: str, shape: Sequence[int], dtype: torch.dtype, plan: ModelPlan, targets: Collection[str]
) -> tuple[Tensor, ...]:
    """The meta tensors that a rank holds of base parameter `name`, of whole shape `shape`, before dp shards it; codes
    and scales if it is packed.

    targets: names of the modules with LoRA. A linear that is not replaced keeps its stored shape.
    """
    owner = name if name in plan.projections else name.removesuffix(".weight")  # experts are parameters themselves
    if owner in plan.quantized:
        packed = packed_like(owner, dtype, plan, device="meta")
        return packed.codes, packed.scales
    return (torch.empty(_local_shape(name, shape, plan, targets), dtype=dtype, device="meta"),)


def packed_like(name: str, dtype: torch.dtype, plan: ModelPlan, *, device: str = "cpu") -> Packed:
    """The packed matrix, or stack of them, that a rank holds of `name`, of any values."""
    rule, packing = plan.rule_of(name), plan.quantized[name]
    assert rule is not None, name
    rows, columns = local_blocks(plan, rule, packing)
    if packing.kind in COMPUTE.values():
        return matrix_like(sum(rows), sum(columns), packing.kind, dtype, device=device)
    experts, is_transposed = [], False
    if isinstance(rule, ExpertRule):
        experts, is_transposed = [rule.num_experts // plan.topology.ep], rule.is_transposed
    codes = torch.empty(*experts, sum(rows), sum(columns) * BITS[packing.kind] // 8, dtype=torch.uint8, device=device)
    of_scales = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}[packing.scale_bytes]
    across = len(columns) + FACTOR_BYTES.get(packing.kind, 0)
    if packing.kind in WITH_ZEROS:
        across *= 2
    scales = torch.empty(*experts, len(rows), across, dtype=of_scales, device=device)
    return Packed(codes, scales, Form(packing.kind, dtype, rows, columns, is_transposed))


def _local_shape(name: str, shape: Sequence[int], plan: ModelPlan, targets: Collection[str]) -> tuple[int, ...]:
    tp = plan.topology.tp
    owner, _, leaf = name.rpartition(".")
    if name in plan.parameters:
        rule = plan.parameters[name]
        return (*shape[: rule.dim], rule.layout.local_size(tp), *shape[rule.dim + 1 :])
    if owner in plan.linears:
        linear = plan.linears[owner]
        inside, out = linear.local_features(tp)
        if leaf == "bias":
            return (out,)
        is_ours = linear.split is not Split.WHOLE or owner in targets or owner in plan.quantized
        if not is_ours:
            return tuple(shape)
        return out, inside  # as nn.Linear: a Conv1D that we replace is turned round
    # The bias of experts is a parameter beside the matrix, and named after it.
    expert = plan.projections.get(name.removesuffix("_bias"))
    if expert is not None:
        inside, out = expert.local_features(plan.topology.etp)
        experts = expert.num_experts // plan.topology.ep
        if name not in plan.projections:
            return experts, out
        if expert.is_transposed:
            return experts, inside, out
        return experts, out, inside
    return tuple(shape)


@dataclass(frozen=True)
class Phase:
    """One part of a step: its peak and end, in bytes relative to its start."""

    peak: float
    end: float


@dataclass(frozen=True)
class LayerMemory:
    """Memory of one decoder layer.

    Attributes:
        forward: with its output, and with its input only if that is saved. saved: the part kept for its backward,
            without its input. output: its residual stream. kept_input: its input, 0 if not saved.
        gradients: of its factors.
    """

    forward: Phase
    backward: Phase
    saved: float
    output: float
    kept_input: float
    gradients: float


@dataclass(frozen=True)
class StepMemory:
    """Of a micro-batch: before the layers, each kind of them, after, a chunk of `chunk_tokens`, its backward."""

    before: Phase
    layers: tuple[LayerMemory, ...]
    after: Phase
    chunk: Phase
    back: Phase
    chunk_tokens: int

    def at(self, other: StepMemory, rows: int, chunk_tokens: int) -> StepMemory:
        """Extrapolate from this with one row and `other` with two to `rows`, and the chunk to `chunk_tokens`."""
        grown = other.chunk_tokens - self.chunk_tokens  # 0 where both traces had one whole chunk
        chunks = 1 + (chunk_tokens - self.chunk_tokens) / grown if grown else 1.0
        found: StepMemory = _grown(self, other, rows)
        return dataclasses.replace(found, chunk=_grown(self.chunk, other.chunk, chunks), chunk_tokens=chunk_tokens)


def _grown(one: Any, two: Any, times: float) -> Any:
    """Extrapolate every number linearly, from those for one row and two to those for `times` rows."""
    if isinstance(one, tuple):
        return tuple(_grown(a, b, times) for a, b in zip(one, two, strict=True))
    if dataclasses.is_dataclass(one):
        made: Any = type(one)
        fields = dataclasses.fields(one)
        return made(*(_grown(getattr(one, field.name), getattr(two, field.name), times) for field in fields))
    return one + (times - 1) * (two - one)  # linear in rows


@dataclass(frozen=True)
class Peak:
    """Bytes of a step beyond the states. activations: saved for the backward. working: the peak beyond them.

    largest: the peak of all but the states, gradients included. host: of inputs of layers that wait there.
    """

    activations: int
    working: int
    largest: int
    host: int = 0


@dataclass(frozen=True)
class Prologue:
    """What layers are given, and where their inputs wait for the backward.

    Attributes:
        stream: bytes of the whole residual stream. tables: of what is made there the bytes that layers keep, as rotary
            tables. is_trained_before: whether the input of the first layer requires grad.
        offloads: whether inputs of layers, all of them recomputed, wait on the host.
    """

    stream: float = 0.0
    tables: float = 0.0
    is_trained_before: bool = False
    offloads: bool = False


_NOTHING = Prologue()


def _pinned(num_bytes: float) -> int:
    """Of a buffer that torch pins: a power of two."""
    return int(2 ** math.ceil(math.log2(max(1.0, num_bytes))))


@dataclass
class _Walk:
    """A rank's memory in a step's turns. gathered: bytes of each layer's gathered copies. Others: as in `peak_of`."""

    memory: StepMemory
    order: Sequence[int]
    recomputed: Sequence[bool]
    gathered: Sequence[int]
    prologue: Prologue
    start: float
    activations: float = 0.0
    host: float = 0.0
    most_on_host: float = 0.0

    def __post_init__(self) -> None:
        self.live = self.most = self.start

    def input_of(self, index: int, stage: Stage) -> float:
        """Bytes of the input of layer `index`."""
        return self.memory.layers[self.order[max(index - 1, stage.start)]].output

    def run(self, phase: Phase, beside: float = 0.0) -> None:
        self.most = max(self.most, self.live + beside + phase.peak)
        self.live += phase.end

    def forward(self, stage: Stage) -> None:
        self.run(self.memory.before)
        if not stage.is_first:
            received = self.memory.layers[self.order[stage.start]].output
            self.run(Phase(received, received))
        before = 0  # the buffer of the layer before lives until this one's is copied out
        for index in range(stage.start, stage.stop):
            layer, whole = self.memory.layers[self.order[index]], self.gathered[index]
            if (
                self.prologue.offloads and index > stage.start + 1
            ):  # the first input is held by the model until its forward ends
                self.live -= self.input_of(index - 1, stage)
            self.run(Phase(2 * whole + before, 0))
            phase = layer.forward
            if self.recomputed[index]:
                phase = Phase(phase.peak, layer.output)  # the rest is dropped, and made again in the backward
            self.run(phase, beside=2 * whole)
            before = whole
        if self.prologue.offloads:
            for index in range(stage.start, stage.stop):
                self.host += _pinned(self.input_of(index, stage))
            self.most_on_host = max(self.most_on_host, self.host)
        self.activations = max(self.activations, self.live - self.start)
        if self.prologue.offloads and stage.stop - stage.start > 1 and not stage.is_first:
            self.live -= self.input_of(stage.start, stage)
        if stage.is_last:
            self.run(self.memory.after)
            self.run(self.memory.chunk)
        else:
            # The input of the first layer.
            is_kept = self.recomputed[stage.start] and not self.prologue.offloads
            keeps = stage.is_first and (is_kept or self.prologue.is_trained_before)
            kept = self.memory.layers[self.order[stage.start]].output if keeps else 0.0
            sent = self.memory.layers[self.order[stage.stop - 1]].output
            self.run(Phase(self.prologue.stream, kept + self.prologue.tables - self.memory.before.end - sent))

    def backward(self, stage: Stage, *, accumulates: bool) -> None:
        if stage.is_last:
            self.run(self.memory.back)
        else:
            received = self.memory.layers[self.order[stage.stop - 1]].output
            self.run(Phase(received, received))
        for index in reversed(range(stage.start, stage.stop)):
            layer, whole = self.memory.layers[self.order[index]], self.gathered[index]
            if self.prologue.offloads and index > stage.start:  # that of the layer before is fetched meanwhile
                self.run(Phase(0, self.input_of(index - 1, stage)))
            new = 0.0 if accumulates else layer.gradients  # they exist from the micro-batch before
            # The end of the traced backward includes its gradients.
            back = Phase(layer.backward.peak, layer.backward.end - layer.gradients + new)
            if self.recomputed[index]:
                # It starts from its saved input, and then saves what the forward would have saved.
                end = back.end + layer.saved + layer.kept_input - layer.output
                back = Phase(max(layer.forward.peak, layer.saved + back.peak), end)
            self.run(Phase(2 * whole, 0))
            self.run(back, beside=whole + (self.gathered[index - 1] if index > stage.start else 0))
            if self.prologue.offloads:
                self.host -= _pinned(self.input_of(index, stage))


def peak_of(
    memory: StepMemory,
    order: Sequence[int],
    states: States,
    *,
    recomputed: Sequence[bool],
    accumulates: bool,
    dp: int,
    stages: Sequence[Stage] = (),
    turns: Sequence[Turn] = ((0, 0, True), (0, 0, False)),
    prologue: Prologue = _NOTHING,
) -> Peak:
    """Walk through a step and track the peak.

    Under dp_shard a layer runs on copies out of the gather's buffer. In the forward that buffer lives until the next
    layer's has been copied out; in the backward it is freed, while that of the preceding layer is being filled.

    A stage that is not the first has zeros in place of embedded tokens until its forward ends, one that is not the last
    as many more after its last layer.

    order: the kind of each layer. recomputed: whether each layer is recomputed. accumulates: whether gradients of an
    earlier micro-batch already exist. dp: the number of ranks that a layer is gathered from. stages: of a pp rank, by
    default one of all layers. turns: its forwards and backwards in order.
    """
    stages = stages or (Stage(0, len(order)),)
    gathered = [0] * len(order)
    if states.shards:
        gathered = [dp * states.shards[kind] for kind in order]
    start = float(states.gradients) if accumulates else 0.0
    walk = _Walk(memory, order, recomputed, gathered, prologue, start)
    held: dict[tuple[int, int], float] = {}  # of each forward whose backward is to come
    here, of_last = (-1, -1), 0.0  # the last forward, and the input of its last layer
    for number, place, is_forward in turns:
        if is_forward:
            if prologue.offloads and here in held:  # it lets go of its last layer's input
                walk.live -= of_last
                held[here] -= of_last
            before = walk.live
            walk.forward(stages[place])
            here, of_last = (number, place), walk.input_of(stages[place].stop - 1, stages[place])
            held[here] = walk.live - before
        else:
            before = walk.live
            if prologue.offloads and here != (number, place):
                walk.run(Phase(0, walk.input_of(stages[place].stop - 1, stages[place])))
            walk.backward(stages[place], accumulates=accumulates)
            walk.live = before - held.pop((number, place))  # frees what its forward kept
    # A bucket is reduced as a flat copy, out of place; the norm squares one parameter at a time in fp64.
    summed = 2 * max(states.buckets.values(), default=0)
    # In a turn, in the reduction, in the norm.
    most = max(walk.most, states.gradients + summed, states.gradients + 4 * states.largest)
    return Peak(int(walk.activations), int(most - walk.activations), int(most), int(walk.most_on_host))
