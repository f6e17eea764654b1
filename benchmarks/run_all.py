"""`make bench`: items 1 to 8 with their quick settings, one after the other, and one table of all.

    python benchmarks/run_all.py [--item N ...] [--total-s S] [--out benchmarks/results/NAME]

Owns: the order, the time limit, the table of all. Does not own: what an item measures (its script), the form of rows
(table.py). Each script is a process of its own, and nothing else runs beside it.

All of them end within `--total-s`: an item gets a share of what is left, begins no turn that would end after it, and is
stopped where it takes more than three times as long. On slow cores models are smaller, and without units for bfloat16
everything is float32 (cores.py).

Ends with 1 if systems differed somewhere, so that a time would say nothing; else with 2 if an item did not run at all;
else with 0, also where targets are missed: the table says which.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import table

HERE = Path(__file__).parent
ITEMS = {
    1: HERE / "dense_vs_peft.py",
    2: HERE / "tp_vs_peft.py",
    3: HERE / "moe_vs_peft.py",
    4: HERE / "collectives.py",
    5: HERE / "startup.py",
    6: HERE / "loss_memory.py",
    7: HERE / "many_adapters.py",
    8: HERE / "padded_vs_peft.py",
}
TOTAL_S = 840  # below 15 minutes with the start of Python and the page
# Of an item, against the others: those with most systems and shapes need most. Others than these have 1.
WEIGHTS = {1: 1.5, 2: 2.5, 3: 1.5, 7: 2.0, 8: 1.5}
LEAST_S = 40  # what the items after one keep of the time, each


@dataclass(frozen=True)
class Outcome:
    """Of one item. document: its results file, where it wrote one. trouble: why there are no rows."""

    item: int
    script: str
    seconds: float
    document: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""

    @property
    def code(self) -> int:
        """As a benchmark's own exit code."""
        if not self.document:
            return table.NOT_RUN
        return table.DONE if self.document["parity"]["agrees"] else table.PARITY_FAILED

    @property
    def rows(self) -> list[table.Row]:
        return table.rows_of(self.document) if self.document else []


def run_item(item: int, script: Path, *, limit_s: float, options: Sequence[str] = ()) -> Outcome:
    """Run one script with `--quick`, and stop it after `limit_s`. What it says on its standard error goes through, its
    page is in its results.
    """
    started = time.perf_counter()
    if not script.is_file():
        return Outcome(item, script.name, 0.0, trouble="there is no such script")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, str(script), "--quick", "--json", str(file), *options]
        # A session of its own: a script that is stopped takes its ranks with it.
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        trouble = ""
        try:
            code = process.wait(timeout=limit_s)
            if code:
                trouble = f"it ended with {code}"
        except subprocess.TimeoutExpired:
            trouble = f"it took more than {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.perf_counter() - started
        document = json.loads(file.read_text()) if file.is_file() else {}
    if document and not document["parity"]["agrees"]:
        parity = document["parity"]
        trouble = f"PARITY FAILED: {parity['what']}, {parity['difference']:.1e} off, limit {parity['limit']:.0e}"
    elif not document:
        trouble = trouble or "it wrote no results"
    return Outcome(item, script.name, seconds, document, trouble)


def run_items(items: Mapping[int, Path], *, total_s: float = TOTAL_S, options: Sequence[str] = ()) -> list[Outcome]:
    """All of them, one after the other, each with `options` too, within `total_s`."""
    outcomes, started, left = [], time.perf_counter(), dict(items)
    for item, script in items.items():
        budget_s, limit_s = time_for(list(left), total_s - (time.perf_counter() - started))
        del left[item]
        print(f"item {item}: {script.name} ... {budget_s:.0f} s", file=sys.stderr, flush=True)
        own = [f"--budget-s={budget_s:.0f}", *options]
        outcomes.append(run_item(item, script, limit_s=limit_s, options=own))
        print(f"item {item}: {outcomes[-1].seconds:.0f} s {outcomes[-1].trouble}", file=sys.stderr, flush=True)
    return outcomes


def time_for(items: Sequence[int], left_s: float) -> tuple[float, float]:
    """(budget, limit) in seconds of the first of `items`, for all of which there are `left_s`."""
    weights = [WEIGHTS.get(item, 1.0) for item in items]
    share = left_s * weights[0] / sum(weights)
    return 0.8 * share, max(min(3 * share, left_s - LEAST_S * (len(items) - 1)), 1.0)  # 0.8: it ends a turn late


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Parity that failed is worse than what did not run."""
    codes = {outcome.code for outcome in outcomes}
    return next((code for code in (table.PARITY_FAILED, table.NOT_RUN) if code in codes), table.DONE)


def numbered(outcomes: Sequence[Outcome]) -> list[table.Row]:
    """The rows of all, each with the number of its item."""
    return [
        table.Row(**{**vars(row), "what": f"{outcome.item}. {row.what}"})
        for outcome in outcomes
        for row in outcome.rows
    ]


def conclusion(outcomes: Sequence[Outcome]) -> list[str]:
    """What did not run or did not agree, then how many targets were met."""
    targets = [row.is_met for row in numbered(outcomes) if row.is_met is not None]
    lines = [f"item {o.item} ({o.script}): {o.trouble}" for o in outcomes if o.trouble]
    missed = f", {targets.count(False)} missed" if False in targets else ""
    agree = sum(o.code == table.DONE for o in outcomes)
    seconds = sum(o.seconds for o in outcomes)
    return [
        *lines,
        f"{targets.count(True)} targets met{missed}; parity in {agree} of {len(outcomes)} items; {seconds:.0f} s",
    ]


def page(outcomes: Sequence[Outcome]) -> str:
    """The Markdown page of all."""
    documents = [outcome.document for outcome in outcomes if outcome.document]
    known = documents[0] if documents else {"hardware": table.hardware(), "versions": table.versions()}
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    lines = [
        "# All benchmarks, quick settings",
        "",
        f"- command: `{table.command()}`",
        f"- hardware: {known['hardware']}",
        f"- versions: {versions}",
        "- in each item loss and gradients were compared before anything was timed; ratios are medians over turns of "
        "one run, with the least and the greatest",
        "",
        table.markdown_table(numbered(outcomes)),
        "",
        *(f"- {line}" for line in conclusion(outcomes)),
        "",
        "| item | script | time | parity |",
        "|---|---|---|---|",
    ]
    for outcome in outcomes:
        parity = outcome.document["parity"] if outcome.document else {"what": outcome.trouble, "difference": None}
        off = "" if parity["difference"] is None else f": {parity['difference']:.0e} off, limit {parity['limit']:.0e}"
        lines.append(f"| {outcome.item} | `{outcome.script}` | {outcome.seconds:.0f} s | {parity['what']}{off} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--item", type=int, action="append", choices=ITEMS, help="only this one; may be repeated")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="all items end within so many seconds")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: only shows that the scripts run")
    default = table.default_json("all").with_suffix("")
    parser.add_argument("--out", type=Path, default=default, help="results are written to OUT.md and OUT.json")
    options = parser.parse_args()
    # Ended from outside, it ends the item first, as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    outcomes = run_items(
        {item: script for item, script in ITEMS.items() if options.item is None or item in options.item},
        total_s=options.total_s,
        options=["--tiny"] if options.tiny else [],
    )
    print(table.plain_table(numbered(outcomes)))
    print("\n".join(conclusion(outcomes)))
    documents = {
        outcome.item: {"script": outcome.script, "seconds": outcome.seconds, "trouble": outcome.trouble}
        | outcome.document
        for outcome in outcomes
    }
    # Not with_suffix: a name may hold dots.
    table.write(Path(f"{options.out}.json"), json.dumps(documents, indent=1) + "\n")
    table.write(Path(f"{options.out}.md"), page(outcomes))
    print(f"written: {options.out}.md and .json")
    return exit_code(outcomes)


if __name__ == "__main__":
    sys.exit(main())
