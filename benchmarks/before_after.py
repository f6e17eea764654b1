"""Two trees of meshlora in one run: is a step, or a start, slower than it was?

    git worktree add /tmp/before COMMIT
    python benchmarks/before_after.py --before /tmp/before [--after TREE] [--turns N] [--item NAME] [--json FILE]

Each tree serves in processes of its own, from its own `src` and `benchmarks`, on the same checkpoints; one process, two
(tp=2), a mixture of experts, and from a checkpoint to the first step. Losses of the first steps are compared before
anything is timed. In each turn the trees go before, after, after, before, so that a drift of the machine hits both
alike; the median of the turns' ratios is shown with the least and the greatest. CPU seconds stand beside: they hardly
move where others use the machine. A ratio above 1: `after` is the faster one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TREE = "MESHLORA_BENCHMARK_TREE"  # in the environment of a process that serves: whose benchmarks it imports
if TREE in os.environ:
    sys.path[0] = f"{os.environ[TREE]}/benchmarks"

import moe_vs_peft  # noqa: E402 - from that tree
import startup  # noqa: E402
import tp_vs_peft  # noqa: E402
from cores import dtypes_here  # noqa: E402
from processes import batch_of, be_quiet, open_groups  # noqa: E402
from table import Findings, Parity, ParityError, faster, parser, run, turns_within  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-4  # of a loss; steps of another adapter are 1e-2 off
NUM_LOSSES = 3
ALLOWED = 0.98  # of the speed before


@dataclass(frozen=True)
class Item:
    """What is timed. system: of `benchmark`; shape: sequences and their tokens; steps: of one visit."""

    name: str
    benchmark: str
    system: Any
    shape: tuple[int, int]
    steps: int

    @property
    def module(self) -> Any:
        """The benchmark, imported."""
        return sys.modules[self.benchmark]


def items(*, tiny: bool = False) -> list[Item]:
    """Those of this machine: in bfloat16 where its cores can."""
    dtype = dtypes_here(("bfloat16", "float32"))[0]
    alone, both = (replace(system, dtype=dtype) for system in (tp_vs_peft.ALONE, tp_vs_peft.TP))
    length = 16 if tiny else 64
    return [
        Item(f"one process, {dtype}", "tp_vs_peft", alone, (1, length), 3),
        Item(f"tp=2, {dtype}", "tp_vs_peft", both, (1, length), 3),
        Item("mixture, float32", "moe_vs_peft", moe_vs_peft.OURS, (2, length), 2),
        Item("from a checkpoint to the first step", "startup", startup.ALONE, (1, 32), 1),
    ]


# --- in a tree's own processes --------------------------------------------------------------------------------------


def first_losses(item: Item) -> list[float]:
    """Of the first steps: the later ones say what the gradients of the earlier ones were."""
    candidate = item.module._held["candidate"]
    batch = batch_of(*item.shape, candidate.model.config.vocab_size)
    losses = []
    for _ in range(NUM_LOSSES):
        candidate.optimizer.zero_grad(set_to_none=True)
        losses.append(candidate.gradients(*batch))
        candidate.optimizer.step()
    return losses


def time_steps(item: Item) -> tuple[float, float]:
    """Seconds and CPU seconds of `item.steps` steps, after one that warms the caches up again."""
    candidate = item.module._held["candidate"]
    batch = batch_of(*item.shape, candidate.model.config.vocab_size)
    candidate.step(*batch)
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(item.steps):
        candidate.step(*batch)
    return time.perf_counter() - began, time.process_time() - cpu_began


def time_start(item: Item, folder: Path) -> tuple[float, float]:
    """Seconds and CPU seconds from a checkpoint to the end of the first step."""
    startup.level()
    cpu_began = time.process_time()
    return startup.start(item.system, folder)[0], time.process_time() - cpu_began


def serve(item: Item, folder: Path) -> None:
    """Answer each line of stdin, "losses" or "time", with a line of JSON."""
    is_start = item.benchmark == "startup"
    opened = startup.prepare if is_start else item.module.open_system
    first = folder.with_name("tiny") if is_start else folder
    with tempfile.TemporaryDirectory() as stores, open_groups({item.system: 1}, Path(stores), opened, first) as groups:
        [group] = groups.values()
        for line in sys.stdin:
            if line.strip() == "losses":
                answer = [] if is_start else group.call(first_losses, item)[0]
            else:
                ranks = group.call(time_start, item, folder) if is_start else group.call(time_steps, item)
                answer = [max(clock) for clock in zip(*ranks, strict=True)]
            print(json.dumps(answer), flush=True)


# --- the run --------------------------------------------------------------------------------------------------------


class Tree:
    """A tree that serves one item."""

    def __init__(self, tree: Path, number: int, folder: Path, flags: list[str]) -> None:
        command = [sys.executable, __file__, "--before", str(tree), "--serve", str(number), str(folder), *flags]
        environment = os.environ | {TREE: str(tree), "PYTHONPATH": f"{tree}/src"}
        self.process = subprocess.Popen(
            command, env=environment, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: str) -> Any:
        """Its answer to a line.

        Raises:
            RuntimeError: it ended instead.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of a tree ended with exit code {self.process.wait()}: its words are above")
        return json.loads(line)

    def close(self) -> None:
        """End it: its stdin ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(options: argparse.Namespace) -> Findings:
    """Losses, then turns, an item after the other."""
    rows, details, worst = [], {}, 0.0
    chosen = [item for item in items(tiny=options.tiny) if options.item in item.name]
    flags = ["--tiny"] if options.tiny else []
    with tempfile.TemporaryDirectory() as name:
        tp_vs_peft.make_checkpoint(Path(name) / "tiny", **tp_vs_peft.TINY)
        for place, item in enumerate(chosen, 1):
            folder = _checkpoint(item, Path(name), tiny=options.tiny)
            number = items(tiny=options.tiny).index(item)
            trees = {
                which: Tree(getattr(options, which).resolve(), number, folder, flags) for which in ("before", "after")
            }
            losses = [tree.ask("losses") for tree in trees.values()]
            worst = max([worst, *(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))])
            if not worst <= TOLERANCE:
                raise ParityError(f"{item.name}, losses of the first steps", worst, TOLERANCE)
            seen: dict[str, list[list[float]]] = {"before": [], "after": []}
            turns = 3 if options.quick else options.turns
            for _ in turns_within(turns, options, share=place / len(chosen)):
                visits = [(which, trees[which].ask("time")) for which in ("before", "after", "after", "before")]
                for which, clocks in seen.items():
                    own = [clock for visited, clock in visits if visited == which]
                    clocks.append([sum(clock) / len(own) / item.steps for clock in zip(*own, strict=True)])
            for tree in trees.values():
                tree.close()
            for position, clock in enumerate(("", ", CPU seconds")):
                times = {which: [1e3 * clocks[position] for clocks in turns] for which, turns in seen.items()}
                names = {"unit": "ms", "ours_name": "after", "peer_name": "before", "target": ALLOWED}
                rows.append(faster(f"{item.name}{clock}", times["after"], times["before"], **names))
            details[item.name] = seen
            print(f"{item.name}: {rows[-2].ratio:.3f}, CPU {rows[-1].ratio:.3f}", file=sys.stderr, flush=True)
    parity = Parity("losses of the first steps of both trees", worst, TOLERANCE, agrees=True)
    return Findings(parity, rows, details)


def _checkpoint(item: Item, folder: Path, *, tiny: bool) -> Path:
    """What `item` loads, made where it is not there yet."""
    made = folder / item.benchmark
    if made.exists():
        return made
    if item.benchmark == "moe_vs_peft":
        return moe_vs_peft.make_checkpoint(made, 4 if tiny else 128, moe_vs_peft.TINY if tiny else {})
    sizes = startup.SIZES if item.benchmark == "startup" else {}
    return tp_vs_peft.make_checkpoint(made, **(tp_vs_peft.TINY if tiny else sizes))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--before", type=Path, required=True, metavar="TREE", help="a checkout")
    made.add_argument("--after", type=Path, default=ROOT, metavar="TREE", help="another one; by default this one")
    made.add_argument("--turns", type=int, default=20, help="of each item: before, after, after, before")
    made.add_argument("--item", default="", metavar="PART", help="only items whose name has PART")
    made.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = made.parse_args()
    for tree in (options.before, options.after):
        if not (tree / "src/meshlora").is_dir():
            made.error(f"{tree} is no checkout of meshlora: it has no src/meshlora")
    if not any(options.item in item.name for item in items()):
        made.error(f"--item {options.item}: none of {', '.join(item.name for item in items())}")
    be_quiet()
    if options.serve:
        serve(items(tiny=options.tiny)[int(options.serve[0])], Path(options.serve[1]))
        return 0
    return run("Before and after", options, measure, name="before_after")


if __name__ == "__main__":
    sys.exit(main())
