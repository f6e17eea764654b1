"""From a checkpoint on disk to the end of the first step: time and peak memory, on one and two processes.

    python benchmarks/startup.py [--turns N] [--quick] [--json FILE]

Against `from_pretrained` of transformers + PEFT on one process, and with its own tensor parallelism on two. All read
one random fp32 checkpoint and one adapter from a temporary folder, whose pages are in memory already. The processes
live as long as the benchmark, and the systems take turns; before the first turn each has loaded and trained a tiny
model, so that imports, threads and connections count for none.

Memory is the peak above the level before, of /proc/PID/status: anonymous memory (`RssAnon`), which the kernel cannot
drop, against the shard, which is what a rank's parameters and buffers take; and all resident memory (`VmRSS`) against
the peer, as `from_pretrained` on a CPU leaves weights where they are in the mapped file. The parent reads both every
2 ms, so that a peak shorter than that may be missed. After the first step gradients and moments are there too.

Loss and every gradient of the first step are compared with those of PEFT on one process.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from processes import Group, be_quiet, open_groups
from table import Findings, Parity, ParityError, Row, faster, parser, run, smaller, turns_within
from tp_vs_peft import (
    ALONE,
    PEER,
    REFERENCE,
    TINY,
    TOLERANCE,
    TP,
    Candidate,
    Shape,
    System,
    difference,
    load,
    make_checkpoint,
    open_system,
    tokens,
)

SIZES = {"num_hidden_layers": 8, "vocab_size": 32_000}  # 160 million parameters
SHAPE = Shape(32, 1)
SYSTEMS = (ALONE, REFERENCE, TP, PEER)
MOST_ABOVE_SHARD = 1.15
SAMPLE_S = 0.002


@dataclass(frozen=True)
class Started:
    """Of one rank. anonymous_bytes, resident_bytes: the peak above the level, as the parent saw it."""

    time_s: float
    load_time_s: float
    shard_bytes: int
    anonymous_bytes: int
    resident_bytes: int


# --- on the ranks ---------------------------------------------------------------------------------------------------

_held: dict[str, Candidate] = {}


def memory(pid: int | str = "self") -> tuple[int, int]:
    """Bytes of a process that no file backs, and all that are resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {
        line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith(("RssAnon", "VmRSS"))
    }
    return int(found["RssAnon"]) * 1024, int(found["VmRSS"]) * 1024


def prepare(system: System, tiny: Path) -> None:
    """Load and train a tiny model."""
    open_system(system, tiny)
    candidate = load(system, tiny)
    candidate.step(*tokens(candidate, SHAPE))


def level() -> tuple[int, int]:
    """Drop the last model; what is left."""
    _held.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory()


def start(system: System, folder: Path) -> tuple[float, float, int]:
    """Load, train one step; seconds of all, seconds of the load, bytes of parameters and buffers."""
    started = time.perf_counter()
    candidate = _held["candidate"] = load(system, folder)
    loaded = time.perf_counter() - started
    candidate.step(*tokens(candidate, SHAPE))
    taken = time.perf_counter() - started
    held = {id(t): t for t in (*candidate.model.parameters(), *candidate.model.buffers())}.values()
    local = [t.to_local() if isinstance(t, DTensor) else t for t in held]
    return taken, loaded, sum(t.numel() * t.element_size() for t in local)


def first_gradients(system: System, folder: Path) -> tuple[float, dict[str, Tensor]]:
    """The loss and this rank's part of every gradient of the first step."""
    candidate = load(system, folder)
    loss = candidate.gradients(*tokens(candidate, SHAPE))
    gradients = {name: p.grad for name, p in candidate.factors().items() if p.grad is not None}
    return loss, {name: g.to_local() if isinstance(g, DTensor) else g for name, g in gradients.items()}


# --- the run --------------------------------------------------------------------------------------------------------


def watched(group: Group, folder: Path) -> list[Started]:
    """`start` on all ranks, while their memory is looked at."""
    levels = group.call(level)
    pids = [process.pid for process in group.processes]
    peaks, answers = list(levels), dict[int, Any]()
    for pipe in group.pipes:
        pipe.send((start, (group.system, folder)))
    while len(answers) < len(pids):
        for rank, pipe in enumerate(group.pipes):
            anonymous, resident = memory(pids[rank])
            peaks[rank] = max(peaks[rank][0], anonymous), max(peaks[rank][1], resident)
            if rank not in answers and pipe.poll():
                answers[rank] = pipe.recv()
        time.sleep(SAMPLE_S)
    for ok, value in answers.values():
        if not ok:
            raise RuntimeError(f"{group.system.name}:\n{value}")
    above = [[peak - before for peak, before in zip(*pair, strict=True)] for pair in zip(peaks, levels, strict=True)]
    return [Started(*answers[rank][1], *above[rank]) for rank in range(len(pids))]


def check(groups: dict[str, Group], folder: Path) -> float:
    """The worst relative difference from one-process PEFT.

    Raises:
        ParityError: it is above `TOLERANCE`.
    """
    [(loss, reference)] = groups[REFERENCE.name].call(first_gradients, REFERENCE, folder)
    worst = 0.0
    for name, group in groups.items():
        ranks = group.call(first_gradients, group.system, folder)
        losses = [abs(own - loss) / abs(loss) for own, _ in ranks]
        off = max(*losses, *(difference([g[key] for _, g in ranks], whole) for key, whole in reference.items()))
        if not off <= TOLERANCE:
            raise ParityError(f"{name}, first step, against {REFERENCE.name}", off, TOLERANCE)
        worst = max(worst, off)
    return worst


def rows_of(runs: dict[str, list[list[Started]]]) -> list[Row]:
    """Memory against the shard, then against `from_pretrained`; time against it."""

    def most(field: str, scale: float = 2**20) -> dict[str, list[float]]:
        """By system, of each turn that of the rank that needed most."""
        return {n: [max(getattr(r, field) for r in ranks) / scale for ranks in turns] for n, turns in runs.items()}

    anonymous, resident, shards, times = (
        most("anonymous_bytes"),
        most("resident_bytes"),
        most("shard_bytes"),
        most("time_s", 1),
    )
    rows = []
    for ours, peer in ((ALONE, REFERENCE), (TP, PEER)):
        what = f"start-up, {'one process' if ours.num_ranks == 1 else 'two processes'}"
        name = {"ours_name": ours.name}
        rows += [
            smaller(
                f"{what}, peak memory a rank",
                anonymous[ours.name],
                shards[ours.name],
                unit="MiB",
                peer_name="its shard",
                target=MOST_ABOVE_SHARD,
                **name,
            ),
            smaller(
                f"{what}, with mapped pages of files",
                resident[ours.name],
                resident[peer.name],
                unit="MiB",
                peer_name=peer.name,
                **name,
            ),
            faster(what, times[ours.name], times[peer.name], unit="s", peer_name=peer.name, **name),
        ]
    return rows


def page(runs: dict[str, list[list[Started]]]) -> str:
    """All that was seen, a line a turn."""
    lines = [
        "| system | turn | load | to the first step | shard | peak, anonymous | peak, with mapped pages |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, turns in runs.items():
        for turn, ranks in enumerate(turns, 1):
            most = max(ranks, key=lambda rank: rank.anonymous_bytes)
            lines.append(
                f"| {name} | {turn} | {max(r.load_time_s for r in ranks):.2f} s | {max(r.time_s for r in ranks):.2f} s "
                f"| {most.shard_bytes / 2**20:.0f} MiB | {most.anonymous_bytes / 2**20:.0f} MiB "
                f"| {most.resident_bytes / 2**20:.0f} MiB |"
            )
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> Findings:
    """Parity, then turns."""
    number = 3 if options.quick else options.turns
    runs: dict[str, list[list[Started]]] = {system.name: [] for system in SYSTEMS}
    with tempfile.TemporaryDirectory() as name:
        torch.set_num_threads(1)
        tiny = make_checkpoint(Path(name) / "tiny", **TINY)
        folder = make_checkpoint(Path(name) / "model", **(TINY if options.tiny else SIZES))
        size = sum(file.stat().st_size for file in (folder / "model").iterdir())
        with open_groups(dict.fromkeys(SYSTEMS, 1), Path(name), prepare, tiny) as groups:
            off = check(groups, folder)
            for _ in turns_within(number, options):
                for system, group in groups.items():
                    runs[system].append(watched(group, folder))
    parity = Parity(f"loss and every gradient of the first step, against {REFERENCE.name}", off, TOLERANCE, True)
    details = {
        "checkpoint_bytes": size,
        "runs": {name: [[asdict(rank) for rank in ranks] for ranks in turns] for name, turns in runs.items()},
    }
    head = f"A checkpoint of {size / 2**20:.0f} MiB in fp32, one thread a rank, {SHAPE}.\n\n"
    return Findings(parity, rows_of(runs), details, head + page(runs))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--turns", type=int, default=7, help="of each system")
    options = made.parse_args()
    be_quiet()
    return run("From a checkpoint to the first step", options, measure, name="startup")


if __name__ == "__main__":
    sys.exit(main())
