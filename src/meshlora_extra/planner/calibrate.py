"""Calibration: what the devices at hand reach, as fields of `Hardware`.

Owns: what is timed, the clock, the fields that follow from times. Does not own: what the fields mean
(`meshlora_extra.planner.hardware`), the groups (`comm.groups`).

All ranks measure at once, as they train: they share memory and links, and processors their clock. A number is the
slowest rank's. Each sample is what a step does: products of a decoder layer and of LoRA with their gradients, causal
attention, the operators between them, collectives over each axis, and for the host a step of a model so small that
nothing else takes time. As in a step each reads other memory than the one before it (`_Memory`): the same tensors, over
and over, would come from a cache, and a skinny product then takes half of its time. Samples take turns, several rounds
of all, so that what else the machine does meanwhile is in a few turns of each and not in all turns of one.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import re
import statistics
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import Tensor
from transformers import LlamaConfig

from meshlora.adapter.attach import runtime
from meshlora.comm import collectives
from meshlora.comm.groups import Axis, Mesh
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.verify.budget import Message
from meshlora_extra.planner.fake import Work
from meshlora_extra.planner.trace import loss_of, trace
from meshlora_ground.topology import Topology

# Rounds, and how long a sample is repeated in each, at least.
_ROUNDS, _SAMPLE_S = 5, 0.08
# Collectives in a row, as in a step, and the most times that they are in a round.
_AT_ONCE, _MOST_TURNS = 5, 10
# Bytes of a collective's input: from a sum of two numbers to the residual stream of many tokens.
_MESSAGE_BYTES = (64, 16 * 2**10, 256 * 2**10, 2 * 2**20, 8 * 2**20)
_HEAD = 64
_TINY_TOKENS = 8
# No `Hardware` may have a zero.
_LEAST_S = 1e-9
_NOTHING = Work(0, 0)
_LINK = {False: "node", True: "network"}  # by `Timing.is_network`, as fields of `Hardware` begin


@dataclass(frozen=True)
class _Sizes:
    """Of what is timed on a kind of device: tokens and features of a layer, its LoRA rank, tokens of attention."""

    tokens: int
    hidden: int
    inner: int
    rank: int
    sequences: tuple[int, ...]
    cold_bytes: int  # more than the caches that a core of a CPU reaches, or a GPU has
    in_a_row: int  # kernels: on a GPU the host's wait for the last of them takes longer than a small one


# By the type of a device.
_SIZES = {
    "cpu": _Sizes(256, 768, 2048, 16, (256, 512, 1024), 64 * 2**20, 1),
    "cuda": _Sizes(4096, 4096, 14336, 16, (2048, 4096, 8192), 512 * 2**20, 20),
}


@dataclass(frozen=True)
class Timing:
    """A sample and its time.

    Attributes:
        what: product, attention, operators, host or message. work: of one run. is_half: whether in two bytes.
        number: of operators, of a host's sample.
        ranks, is_network, wire_bytes: of a message: its group, and what one rank sends.
        axis: the name of its axes, to show.
    """

    what: str
    work: Work = _NOTHING
    is_half: bool = False
    number: int = 1
    ranks: int = 1
    is_network: bool = False
    wire_bytes: float = 0.0
    axis: str = ""
    seconds: float = 0.0


Sample = tuple[Timing, Callable[[], object]]
Clock = Callable[[Timing, Callable[[], object]], float]


def measure(samples: Iterable[Sample], clock: Clock, *, rounds: int = _ROUNDS) -> list[Timing]:
    """The samples with their times, each the median of all rounds. Collective over all ranks."""
    every = list(samples)
    times: list[list[float]] = [[] for _ in every]
    for _ in range(rounds):
        for own, (what, run) in zip(times, every, strict=True):
            own.append(clock(what, run))
    return [replace(what, seconds=statistics.median(own)) for own, (what, _) in zip(times, every, strict=True)]


def clock_of(mesh: Mesh) -> Clock:
    """Seconds of one run: the median of those of a round, on the slowest rank, all ranks at once."""

    def wait() -> None:
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)

    def once(run: Callable[[], object], times: int = 1) -> float:
        started = time.perf_counter()
        for _ in range(times):
            run()
        wait()
        return (time.perf_counter() - started) / times

    def slowest(own: float) -> float:
        told = torch.tensor([own], dtype=torch.float64, device=mesh.device)  # float64: a clock's digits
        return float(collectives.all_gather(told, mesh.world).max())

    def clock(what: Timing, run: Callable[[], object]) -> float:
        once(run)  # memory, plans of kernels, sockets
        first = slowest(once(run))
        if what.what == "message":  # as many on every rank, or one would wait for what nobody sends
            turns = int(min(_MOST_TURNS, max(1, _SAMPLE_S / _AT_ONCE / first)))
            return slowest(statistics.median(once(run, _AT_ONCE) for _ in range(turns)))
        found, started = list[float](), time.perf_counter()
        while not found or time.perf_counter() - started < _SAMPLE_S:
            found.append(once(run, _SIZES[mesh.device.type].in_a_row))
        return slowest(statistics.median(found))

    return clock


# --- what is timed --------------------------------------------------------------------------------------------------


def samples_of(mesh: Mesh, dtypes: Sequence[torch.dtype], *, gpus_per_node: int) -> Iterator[Sample]:
    """All samples, of products in each of `dtypes`. Every rank must run all of them, in order."""
    for dtype in dtypes:
        memory = _Memory(mesh.device, dtype)
        yield from _products(memory)
        yield from _attention(mesh.device, dtype)
        yield from _operators(memory)
        yield _host(mesh, dtype)
    yield from _messages(mesh, gpus_per_node)


class _Memory:
    """So much memory, each tensor after the other, that none is in a cache when it is taken again; as in a step, whose
    weights are those of other layers and whose results are kept for the backward.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._num_bytes = _SIZES[device.type].cold_bytes
        self._values = torch.randn(self._num_bytes // dtype.itemsize, dtype=dtype, device=device)
        self._kept, self._kept_bytes, self._taken = deque[Tensor](), 0, 0

    def tensors(self, *shape: int) -> Iterator[Tensor]:
        """Tensors of `shape`, without end."""
        number = len(self._values) // math.prod(shape)
        views = self._values[: number * math.prod(shape)].view(number, *shape).unbind()
        self._taken += 1  # two that are taken at once are not the same
        start = self._taken % number
        return itertools.cycle(views[start:] + views[:start])

    def kept(self, run: Callable[..., Tensor], *given: Iterator[Tensor]) -> Callable[[], None]:
        """`run` of the next tensors of each of `given`, whose result is held for a while."""

        def keep() -> None:
            found = run(*map(next, given))
            self._kept.append(found)  # as a step keeps results for its backward
            self._kept_bytes += found.nbytes
            while self._kept_bytes > self._num_bytes:
                self._kept_bytes -= self._kept.popleft().nbytes

        return keep


def _products(memory: _Memory) -> Iterator[Sample]:
    """`[n, k] x [k, m]`: the layer's own, and LoRA's with r as any of the three."""
    sizes = _SIZES[memory.device.type]
    tokens, hidden, inner, rank = sizes.tokens, sizes.hidden, sizes.inner, sizes.rank
    size, is_half = memory.dtype.itemsize, memory.dtype.itemsize == 2
    for n, k, m in (
        *((tokens, hidden, inner), (tokens, inner, hidden), (tokens, hidden, hidden), (tokens, hidden, hidden // 4)),
        *((tokens, hidden, rank), (tokens, rank, hidden), (rank, tokens, hidden), (hidden, tokens, rank)),
        *((tokens, inner, rank), (tokens, rank, inner), (tokens, hidden, 4 * rank)),
    ):
        work = Work(2 * n * k * m, size * (n * k + k * m + n * m))
        left, right = memory.tensors(n, k), memory.tensors(m, k)  # [m, k]: weights lie transposed
        yield Timing("product", work, is_half), memory.kept(lambda left, right: left @ right.T, left, right)


def _attention(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Causal, forward and backward as one."""
    sizes = _SIZES[device.type]
    for tokens in sizes.sequences:
        shape = (1, sizes.hidden // _HEAD, tokens, _HEAD)
        query, key, value = (torch.randn(*shape, dtype=dtype, device=device).requires_grad_() for _ in range(3))
        given = torch.randn(*shape, dtype=dtype, device=device)

        def run(query: Tensor = query, key: Tensor = key, value: Tensor = value, given: Tensor = given) -> None:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(out, (query, key, value), given)

        # As `meshlora_extra.planner.fake` counts both: 2 and 5 products of half of the pairs; the inputs, results and
        # statistics.
        work = Work(7 * query.numel() * tokens, 12 * query.nbytes, is_attention=True)
        yield Timing("attention", work, dtype.itemsize == 2), run


def _operators(memory: _Memory) -> Iterator[Sample]:
    """Between products, about as often as in a layer: of a residual stream, a gated MLP with its backward, a norm,
    rotary embeddings, and of a softmax in float32.
    """
    tokens, width = _SIZES[memory.device.type].tokens, _SIZES[memory.device.type].inner
    shape, half, is_half = (tokens, width), width // 2, memory.dtype.itemsize == 2
    scale = torch.randn(width, dtype=memory.dtype, device=memory.device)
    own, wide = tokens * width * memory.dtype.itemsize, 4 * tokens * width
    logits = memory
    if memory.dtype != torch.float32:
        logits = _Memory(memory.device, torch.float32)
    samples: tuple[tuple[_Memory, int, int, Callable[..., Tensor]], ...] = (
        (memory, 3 * own, 2, torch.add),
        (memory, 3 * own, 2, torch.mul),
        (memory, 4 * own, 3, torch.addcmul),
        (memory, 2 * own, 1, lambda x: x * scale),
        (memory, 2 * own, 1, torch.square),
        (memory, 2 * own, 1, F.silu),
        (memory, 3 * own, 2, torch.ops.aten.silu_backward),
        (memory, 2 * own, 1, lambda x: torch.cat((x[:, half:], x[:, :half]), -1)),
        (logits, 2 * wide, 1, torch.exp),
        (logits, wide, 1, lambda x: x.sum(-1)),
    )
    for of, num_bytes, number, run in samples:
        given = [of.tensors(*shape) for _ in range(number)]
        yield Timing("operators", Work(0, num_bytes), is_half), of.kept(run, *given)


def _host(mesh: Mesh, dtype: torch.dtype) -> Sample:
    """Forward and backward of a model whose operators take no time but the host's, each rank with its own tokens."""
    lora = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear")
    alone = Topology()  # the operators are counted on one rank
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=_TINY_TOKENS,
    )

    name: Any = str(dtype).removeprefix("torch.")

    def blueprint(topology: Topology) -> Blueprint:
        return make_blueprint(config, topology, BaseOptions(dtype=name)).with_adapter(lora)

    traced = trace(blueprint(alone), rows=1, tokens=_TINY_TOKENS, device=mesh.device.type)
    number = sum(work.total() for work in traced.work.values())
    own = blueprint(Topology.parse(f"dp={mesh.topology.world}"))
    model = load_blueprint(own, device=mesh.device.type).train()
    ids = torch.zeros(1, _TINY_TOKENS, dtype=torch.int64, device=mesh.device)

    def run() -> None:
        loss_of(model, own.plan, runtime(model).mesh, ids, _TINY_TOKENS, at_chunk=lambda: None).backward()
        for parameter in model.parameters():
            parameter.grad = None  # else the next turn would add to it

    return Timing("host", number=number, is_half=dtype.itemsize == 2), run


def _messages(mesh: Mesh, gpus_per_node: int) -> Iterator[Sample]:
    """Each collective over each axis with several ranks, all its groups at once."""
    for name, size in mesh.topology.sizes.items():
        if size == 1:
            continue
        axis = mesh.over({name})
        is_network = any(rank // gpus_per_node != axis.ranks[0] // gpus_per_node for rank in axis.ranks)
        for num_bytes in _MESSAGE_BYTES:
            for kind, own_bytes, run in _collectives(axis, num_bytes, mesh.device):
                wire = Message("", kind, frozenset({name}), own_bytes).wire_bytes(size)  # bytes that one rank sends
                what = Timing("message", ranks=size, is_network=is_network, wire_bytes=wire, axis=name)
                yield what, run


def _collectives(axis: Axis, num_bytes: int, device: torch.device) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """(kind, bytes of a rank's input, the collective), with at most `num_bytes` on a rank."""
    rows = max(1, num_bytes // (4 * axis.size))
    whole = torch.zeros(rows * axis.size, device=device)  # float32
    part, each = whole[:rows], [rows] * axis.size
    yield "allreduce", whole.nbytes, lambda: collectives.all_reduce_sum(whole, axis)
    yield "allgather", part.nbytes, lambda: collectives.all_gather(part, axis)
    yield "reducescatter", whole.nbytes, lambda: collectives.reduce_scatter_sum(whole, axis)
    yield "alltoall", whole.nbytes, lambda: collectives.exchange_rows(whole, axis, each, each)


# --- what follows -----------------------------------------------------------------------------------------------------


def fields_of(timings: Sequence[Timing], *, waits: bool) -> dict[str, Any]:
    """The fields of `Hardware` that reproduce `timings`.

    waits: whether the host waits for each kernel, as on CPUs. Else it runs ahead, and what it takes for an operator is
    the least time between two kernels.
    """
    found: dict[str, Any] = {}
    for is_half, name in ((False, "full"), (True, "half")):
        for what, field in ("product", "products"), ("attention", "attention"):
            if rates := _rates([t for t in timings if t.is_half == is_half and t.what == what]):
                found[f"{name}_{field}"] = rates
        if products := found.get(f"{name}_products"):
            found[f"{name}_tflops"] = max(tflops for _, tflops in products)
    found |= _memory(timings)
    host_s = max((t.seconds / t.number for t in timings if t.what == "host"), default=_LEAST_S)
    if waits:  # then nothing is left to the launch
        found["host_s"], host_s = host_s, _LEAST_S
    found["kernel_s"] = host_s
    return found | _links([timing for timing in timings if timing.what == "message"])


def _rates(timings: Sequence[Timing]) -> list[list[float]]:
    """Pairs of (flops per byte, TFLOP/s): those within a factor of two as one, which reproduces their summed time."""
    groups: dict[int, list[Timing]] = {}
    for timing in timings:
        groups.setdefault(round(math.log2(timing.work.flops / timing.work.num_bytes)), []).append(timing)
    rates = []
    for _, group in sorted(groups.items()):
        intensity = sum(t.work.flops for t in group) / sum(t.work.num_bytes for t in group)
        # Each counts alike, whatever its size.
        rates.append([intensity, 1e-12 / statistics.mean(t.seconds / t.work.flops for t in group)])
    return rates


def _memory(timings: Sequence[Timing]) -> dict[str, float]:
    """The best operator's bandwidth, and the share of it that all together reach."""
    best, together = 0.0, {}
    for is_half in (False, True):
        own = [timing for timing in timings if timing.what == "operators" and timing.is_half == is_half]
        if own:
            together[is_half] = sum(t.work.num_bytes for t in own) / sum(t.seconds for t in own)
            best = max(best, *(t.work.num_bytes / t.seconds for t in own))
    fields = {"memory_gb_s": best / 1e9, "memory_efficiency": together.get(False, together.get(True, best)) / best}
    if True in together:
        fields["half_memory_efficiency"] = together[True] / best
    return fields


def _links(messages: Sequence[Timing]) -> dict[str, float]:
    """alpha, what a doubling of the ranks adds to it, and bandwidth, by least squares of relative errors.

    What cannot be told apart is alpha: with groups of one size, doublings inside a machine. A link without a message is
    left out.
    """
    found = {"link_efficiency": 1.0}
    if not messages:
        return found
    links = sorted({_LINK[timing.is_network] for timing in messages}, reverse=True)  # that inside machines first
    columns = {"launch_s": [1.0] * len(messages)}
    for link in links:
        wire_bytes, doublings = [], []  # of the messages of other links 0
        for timing in messages:
            is_own = _LINK[timing.is_network] == link
            wire_bytes.append(timing.wire_bytes * is_own)
            doublings.append(math.log2(timing.ranks) * is_own)
        columns[f"{link}_gb_s"] = wire_bytes
        if len({*doublings} - {0.0}) > 1 or (link == "network" and len(links) > 1):
            columns[f"{link}_hop_s"] = doublings
    fitted = _fit(columns, [timing.seconds for timing in messages])
    for link in links:
        found[f"{link}_gb_s"] = 1e-9 / fitted.get(f"{link}_gb_s", 1e-15)
        found[f"{link}_hop_s"] = fitted.get(f"{link}_hop_s", _LEAST_S)
    return found | {"launch_s": fitted.get("launch_s", _LEAST_S)}


def _fit(columns: Mapping[str, Sequence[float]], seconds: Sequence[float]) -> dict[str, float]:
    """Factor of each column, without those that would be negative."""
    names, times = list(columns), np.array(seconds)
    while True:
        matrix = np.array([columns[name] for name in names]).T / times[:, None]
        # Bytes and ones differ by a million: equal lengths keep the equations well conditioned.
        lengths = np.linalg.norm(matrix, axis=0)
        # Of relative errors: each row is divided by its time.
        factors = np.linalg.lstsq(matrix / lengths, np.ones(len(times)), rcond=None)[0] / lengths
        kept = [name for name, factor in zip(names, factors, strict=True) if factor > 0]
        if len(kept) == len(names):
            return dict(zip(names, factors.tolist(), strict=True))
        names = kept  # fitted again without them: the others take their part


# --- the machines -----------------------------------------------------------------------------------------------------


def machines(mesh: Mesh) -> tuple[int, int]:
    """(ranks on a machine, at most; machines). Collective over all ranks."""
    # Names as numbers, which collectives carry.
    own = torch.tensor([zlib.crc32(platform.node().encode())], dtype=torch.int64, device=mesh.device)
    ranks = Counter(collectives.all_gather(own, mesh.world).tolist())
    return max(ranks.values()), len(ranks)


def calibrate(
    mesh: Mesh, dtypes: Sequence[torch.dtype], *, clock: Clock | None = None
) -> tuple[dict[str, Any], list[Timing]]:
    """(fields of `Hardware`, what they follow from). Collective over all ranks; in less than two minutes."""
    samples = samples_of(mesh, dtypes, gpus_per_node=machines(mesh)[0])
    timings = measure(samples, clock or clock_of(mesh))
    return hardware_of(mesh, timings), timings


def hardware_of(mesh: Mesh, timings: Sequence[Timing]) -> dict[str, Any]:
    """All fields of `Hardware`, with those that follow from `timings` of its samples. Collective over all ranks."""
    (per_node, nodes), device = machines(mesh), mesh.device
    name, threads = "cpu", f", {torch.get_num_threads()} threads each"
    host_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    memory_gb = host_gb / per_node  # shared by its ranks
    if device.type == "cuda":
        name, threads, memory_gb = torch.cuda.get_device_name(device), "", torch.cuda.mem_get_info(device)[1] / 1e9
    return {
        "name": re.sub(r"[\W_]", "-", name).lower(),
        "device": device.type,
        "ranks": mesh.topology.world,
        "nodes": nodes,
        "gpus_per_node": per_node,
        "memory_gb": memory_gb,
        "host_memory_gb": host_gb,
        **fields_of(timings, waits=device.type == "cpu"),
        "source": f"measured on {mesh.topology.world} {device.type} ranks at once as {mesh.topology}{threads}, "
        f"torch {torch.__version__}",
    }
