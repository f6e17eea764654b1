"""Collectives of two and four CPU ranks: direct messages (`comm/direct.py`) against gloo's own.

    python benchmarks/messages.py [--turns N] [--quick] [--tiny] [--json FILE]

Both give the same sum, gather and scattered sum, which is checked first. They take turns, 20 calls each. All ranks are
on this machine and share its cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshlora.comm import collectives
from meshlora.comm.groups import Axis, open_mesh
from meshlora_ground.topology import Topology
from processes import Group, be_quiet, open_groups
from table import Findings, Parity, ParityError, faster, parser, run

SIZES = {"16 KiB": 2**14, "128 KiB": 2**17, "2 MiB": 2**21}
DTYPES = ("float32", "bfloat16")
LIMIT = {"float32": 1e-6, "bfloat16": 2e-2}
CALLS = 20


@dataclass(frozen=True)
class Ranks:
    """So many processes of one thread."""

    name: str
    num_ranks: int


_held: dict[str, Axis] = {}


def open_axis(ranks: Ranks) -> None:
    _held["axis"] = open_mesh(Topology(tp=ranks.num_ranks)).tp


def ways(axis: Axis) -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """Collective -> (ours, gloo's), both of a flat tensor on every rank."""

    def summed(x: Tensor) -> Tensor:
        result = x.clone()
        dist.all_reduce(result, group=axis.group)
        return result

    def gathered(x: Tensor) -> Tensor:
        result = x.new_empty(x.numel() * axis.size)
        collectives._all_gather(result, x, group=axis.group)
        return result

    def scattered(x: Tensor) -> Tensor:
        result = x.new_empty(x.numel() // axis.size)
        collectives._reduce_scatter(result, x, group=axis.group)
        return result

    return {
        "all-reduce": (lambda x: collectives.all_reduce_sum(x, axis), summed),
        "all-gather": (lambda x: collectives.all_gather(x, axis), gathered),
        "reduce-scatter": (lambda x: collectives.reduce_scatter_sum(x, axis), scattered),
    }


def times_of(dtype: str, num_bytes: int, calls: int) -> tuple[dict[str, tuple[float, float]], float]:
    """(collective -> (seconds a call of ours, of gloo's), the worst difference of their results, relative)."""
    axis = _held["axis"]
    generator = torch.Generator().manual_seed(axis.rank)
    kind = getattr(torch, dtype)
    x = torch.randn(num_bytes // kind.itemsize, generator=generator).to(kind)
    found, worst = {}, 0.0
    for name, pair in ways(axis).items():
        ours, theirs = (call(x).float() for call in pair)
        worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
        seconds = []
        for call in pair:
            call(x)
            started = time.perf_counter()
            for _ in range(calls):
                call(x)
            seconds.append((time.perf_counter() - started) / calls)
        found[name] = seconds[0], seconds[1]
    return found, worst


def measure_group(group: Group, dtype: str, num_bytes: int, turns: int, calls: int) -> dict[str, list[list[float]]]:
    """Collective -> [microseconds of ours by turn, of gloo's].

    Raises:
        ParityError: their results differ.
    """
    seconds: dict[str, list[list[float]]] = {}
    for _ in range(turns):
        for_rank = group.call(times_of, dtype, num_bytes, calls)
        worst = max(difference for _, difference in for_rank)
        if not worst <= LIMIT[dtype]:
            raise ParityError(f"{dtype}, {num_bytes} bytes", worst, LIMIT[dtype])
        for name in for_rank[0][0]:
            both = seconds.setdefault(name, [[], []])
            for place in (0, 1):
                both[place].append(1e6 * statistics.median(rank[name][place] for rank, _ in for_rank))
    return seconds


def measure(options: argparse.Namespace) -> Findings:
    """Every collective, size and dtype."""
    be_quiet()
    turns, calls = (2, 2) if options.tiny else (5, CALLS) if options.quick else (options.turns, CALLS)
    rows = []
    systems = [Ranks(f"{number} ranks", number) for number in ((2,) if options.quick or options.tiny else (2, 4))]
    with (
        tempfile.TemporaryDirectory() as folder,
        open_groups(dict.fromkeys(systems, 1), Path(folder), open_axis) as all_,
    ):
        for ranks, group in all_.items():
            for dtype in DTYPES:
                for size, num_bytes in SIZES.items():
                    for name, (ours, theirs) in measure_group(group, dtype, num_bytes, turns, calls).items():
                        what = f"{name}, {ranks}, {size} {dtype} a rank"
                        rows.append(faster(what, ours, theirs, unit="us", ours_name="direct", peer_name="gloo"))
    agreed = Parity(f"results of both, in each turn, limit {LIMIT['float32']:g} in float32", None, None, agrees=True)
    return Findings(agreed, rows, {"sizes": SIZES, "calls": calls})


def main() -> int:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--turns", type=int, default=15, help="of each size (default 15)")
    options = made.parse_args()
    return run("Collectives on CPUs: direct messages against gloo's own", options, measure, name="messages")


if __name__ == "__main__":
    sys.exit(main())
