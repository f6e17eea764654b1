"""Peak memory and time of the loss from hidden states, forward and backward, against logits -> `F.cross_entropy`.

    python benchmarks/loss_memory.py [--vocab V] [--tokens T] [--hidden H] [--repeats N] [--quick] [--json FILE]

Each measurement is a fresh process (for tp=2 two, on gloo) of one thread a rank. Its peak is the high-water mark of its
resident memory above the level before the loss, where weight, hidden states and labels are there already; the gradient
of the hidden states counts. The systems take turns, so that what else the machine does hits all alike. Nothing is
printed unless all have the same loss and the same gradient of the hidden states.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cores import fewer
from meshlora.comm.collectives import copy_one_to_each
from meshlora.comm.groups import Axis, become_rank, leave, open_mesh
from meshlora.layers.head_loss import CHUNK_BYTES, summed_cross_entropy_from_hidden
from meshlora_ground.topology import Topology
from processes import memory_bytes
from table import Findings, Parity, ParityError, Row, faster, parser, run, smaller, turns_within

TOLERANCE = 1e-5  # fp32, relative; a loss over half the vocabulary is 6e-2 off


@dataclass(frozen=True)
class System:
    """One way to the loss, on so many ranks."""

    name: str
    num_ranks: int
    is_plain: bool = False


@dataclass(frozen=True)
class Shape:
    """Of one measurement: all tokens are trained, fp32."""

    vocab: int
    tokens: int
    hidden: int


@dataclass(frozen=True)
class Measured:
    """What one rank saw. Times are of forward and backward together."""

    loss: float
    peak_bytes: int
    time_s: float
    cpu_time_s: float


PLAIN = System("logits, then F.cross_entropy", 1, is_plain=True)
SYSTEMS = (PLAIN, System("meshlora", 1), System("meshlora, tp=2", 2))


# --- one rank -------------------------------------------------------------------------------------------------------


def inputs(shape: Shape, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """hidden `[T, H]`, this rank's rows of the weight `[V/tp, H]`, labels `[T]`: the same in every process."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(shape.tokens, shape.hidden, generator=generator)
    # Logits have variance 1. In place, and the whole weight is gone before anything is measured.
    weight = torch.randn(shape.vocab, shape.hidden, generator=generator).mul_(shape.hidden**-0.5)
    labels = torch.randint(0, shape.vocab, (shape.tokens,), generator=generator)
    if axis.size > 1:
        weight = F.pad(weight, (0, 0, 0, -shape.vocab % axis.size)).chunk(axis.size)[axis.rank].clone()
    return hidden.requires_grad_(), weight, labels


def loss_of(system: System, hidden: Tensor, weight: Tensor, labels: Tensor, axis: Axis, vocab: int) -> Tensor:
    if system.is_plain:
        return F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    entered = copy_one_to_each(hidden, axis)
    return summed_cross_entropy_from_hidden(entered, lambda x: x @ weight.T, labels, axis=axis, vocab=vocab)


def measure_here(system: System, shape: Shape, axis: Axis, gradient_file: Path | None) -> Measured:
    """One forward and backward in this process, which has run nothing of the kind before."""
    hidden, weight, labels = inputs(shape, axis)
    # Threads, kernels and connections come up here, on a handful of tokens and entries.
    few = slice(0, 8)
    loss_of(system, hidden[few], weight[few], labels[few] % (8 * axis.size), axis, 8 * axis.size).backward()
    hidden.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    level = memory_bytes("VmRSS")
    started, cpu_started = time.perf_counter(), time.process_time()
    loss = loss_of(system, hidden, weight, labels, axis, shape.vocab)
    loss.backward()
    times = time.perf_counter() - started, time.process_time() - cpu_started
    peak = memory_bytes("VmHWM") - level
    if gradient_file is not None and axis.rank == 0:
        torch.save(hidden.grad, gradient_file)
    return Measured(loss.item(), peak, *times)


def serve(rank: int, system: System, shape: Shape, store: str, gradient_file: Path | None, pipe: Connection) -> None:
    """Body of one process."""
    torch.set_num_threads(1)
    become_rank(rank, system.num_ranks, "cpu", store=store)
    pipe.send(measure_here(system, shape, open_mesh(Topology(tp=system.num_ranks)).tp, gradient_file))
    leave()


# --- the run --------------------------------------------------------------------------------------------------------


def measure_in_processes(
    system: System, shape: Shape, folder: Path, gradient_file: Path | None = None
) -> list[Measured]:
    """What each rank of `system` measured, in processes of its own."""
    context = multiprocessing.get_context("spawn")
    store = str(folder / f"store-{time.monotonic_ns()}")
    pipes, processes = [], []
    for rank in range(system.num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(rank, system, shape, store, gradient_file, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()


def check(measured: dict[str, list[Measured]], folder: Path) -> dict[str, float]:
    """Relative distance of loss and gradient from the plain way, the greater of both, by system.

    Raises:
        ParityError: one is above `TOLERANCE`.
    """
    expected_loss = measured[PLAIN.name][0].loss
    expected = torch.load(folder / f"{PLAIN.name}.pt")
    worst = {}
    for name, ranks in measured.items():
        gradient = torch.load(folder / f"{name}.pt")
        losses = [abs(rank.loss - expected_loss) / expected_loss for rank in ranks]
        worst[name] = max(*losses, float((gradient - expected).norm() / expected.norm()))
        if not worst[name] <= TOLERANCE:
            raise ParityError(f"{name}, against {PLAIN.name}", worst[name], TOLERANCE)
    return worst


def table(runs: dict[str, list[list[Measured]]], off: dict[str, float]) -> list[str]:
    """One line a system: of its ranks the one that needed most, of its runs the median."""
    rows = {
        name: [
            statistics.median(max(getattr(rank, field) for rank in ranks) for ranks in repeats)
            for field in ("peak_bytes", "time_s", "cpu_time_s")
        ]
        for name, repeats in runs.items()
    }
    plain = rows[PLAIN.name]
    lines = [
        "| system | peak a rank, bytes | ratio | time | ratio | CPU time a rank | ratio | times | off |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (peak, wall, cpu) in rows.items():
        each = ", ".join(f"{max(rank.time_s for rank in ranks):.1f}" for ranks in runs[name])
        lines.append(
            f"| {name} | {peak:,.0f} | {peak / plain[0]:.3f} | {wall:.1f} s | {wall / plain[1]:.2f} "
            f"| {cpu:.1f} s | {cpu / plain[2]:.2f} | {each} s | {off[name]:.0e} |"
        )
    return lines


def rows_of(runs: dict[str, list[list[Measured]]], shape: Shape) -> list[Row]:
    """Memory and time of ours, on one process and on two, against logits of all tokens."""
    peaks = {n: [max(rank.peak_bytes for rank in ranks) / 2**20 for ranks in repeats] for n, repeats in runs.items()}
    times = {n: [max(rank.time_s for rank in ranks) for ranks in repeats] for n, repeats in runs.items()}
    rows = []
    for system in SYSTEMS[1:]:
        names = {"ours_name": system.name, "peer_name": PLAIN.name}
        what = f"loss, vocab {shape.vocab:,} × {shape.tokens:,} tokens"
        rows += [
            smaller(f"{what}, peak memory a rank", peaks[system.name], peaks[PLAIN.name], unit="MiB", **names),
            faster(what, times[system.name], times[PLAIN.name], unit="s", **names),
        ]
    return rows


def measure(options: argparse.Namespace) -> Findings:
    """The first repeat is compared, then all are measured."""
    if options.quick:
        options.tokens, options.repeats = fewer(min(options.tokens, 1024)), 2
    if options.tiny:
        options.vocab, options.tokens, options.hidden = 4096, 512, 64
    shape = Shape(options.vocab, options.tokens, options.hidden)
    runs: dict[str, list[list[Measured]]] = {system.name: [] for system in SYSTEMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for repeat in turns_within(options.repeats, options):
            for system in SYSTEMS:
                file = None if repeat else folder / f"{system.name}.pt"
                runs[system.name].append(measure_in_processes(system, shape, folder, file))
            if repeat == 0:
                off = check({name: repeats[0] for name, repeats in runs.items()}, folder)
    what = f"loss and gradient of the hidden states, against {PLAIN.name}"
    details = {
        "shape": asdict(shape),
        "runs": {n: [[asdict(m) for m in ranks] for ranks in r] for n, r in runs.items()},
    }
    page = [
        f"Loss and its gradient for the hidden states: vocab {shape.vocab:,}, {shape.tokens:,} tokens, hidden "
        f"{shape.hidden:,}, fp32, one thread a rank, chunks of {CHUNK_BYTES // 2**20} MiB of logits. Each measurement "
        "is a fresh process; the peak is resident memory above the level before the loss.",
        "",
        *table(runs, off),
    ]
    return Findings(Parity(what, max(off.values()), TOLERANCE, True), rows_of(runs, shape), details, "\n".join(page))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--vocab", type=int, default=128_256)
    made.add_argument("--tokens", type=int, default=4096)
    made.add_argument("--hidden", type=int, default=1024)
    made.add_argument("--repeats", type=int, default=3, help="fresh processes per system")
    options = made.parse_args()
    return run("The loss without logits, at a large vocabulary", options, measure, name="loss_memory")


if __name__ == "__main__":
    sys.exit(main())
