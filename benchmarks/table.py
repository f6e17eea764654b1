"""What a benchmark hands over: rows with ours, a peer's, their ratio and its spread; as JSON, as Markdown.

Owns: the form of results, the options that all benchmarks share, exit codes. Does not own: what is measured, or how.
The interface in words: benchmarks/README.md. Needs the standard library alone, so that whoever collects results does
not load torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

_STARTED = time.perf_counter()
DONE, PARITY_FAILED, NOT_RUN = 0, 1, 2  # exit codes
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("meshlora", "torch", "transformers", "peft", "liger-kernel")


class ParityError(RuntimeError):
    """A system does not compute what the reference computes: no number of the run is shown.

    difference: relative; limit: what it may be at most.
    """

    def __init__(self, what: str, difference: float, limit: float) -> None:
        super().__init__(f"{what}: {difference:.1e} off, the limit is {limit:.0e}; no numbers are printed")
        self.what, self.difference, self.limit = what, difference, limit


@dataclass(frozen=True)
class Parity:
    """That all systems computed the same before any was timed. difference: the worst, relative; None: nothing to
    compare, as `what` explains."""

    what: str
    difference: float | None
    limit: float | None
    agrees: bool


@dataclass(frozen=True)
class Row:
    """One line of the table: two numbers of the same run.

    Attributes:
        what: what was measured, on which shape. ours, peer: medians, in `unit`.
        ours_name, peer_name: which systems.
        ratio: the median over the turns of one ratio in each turn. How it is made, `ratio_is` says.
        low, high: the least and the greatest ratio of a turn; equal to `ratio` where there was one turn or a count.
        num_turns: of these. better: which ratios are the good ones.
        target: what the ratio should be at least ("higher") or at most ("lower"); None: shown, not asked for.
    """

    what: str
    unit: str
    ours_name: str
    ours: float
    peer_name: str
    peer: float
    ratio: float
    low: float
    high: float
    num_turns: int
    ratio_is: Literal["peer / ours", "ours / peer"]
    better: Literal["higher", "lower"]
    target: float | None = None

    @property
    def is_met(self) -> bool | None:
        """None: there is no target."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.better == "higher" else self.ratio <= self.target


@dataclass(frozen=True)
class Findings:
    """What a benchmark measured. details: whatever else it wants to keep, of plain values; page: more Markdown."""

    parity: Parity
    rows: list[Row]
    details: dict[str, Any] = field(default_factory=dict)
    page: str = ""


# --- rows -----------------------------------------------------------------------------------------------------------


def faster(what: str, ours: Sequence[float], peer: Sequence[float], **rest: Any) -> Row:
    """A row of times or sizes, one of each in a turn; the ratio is peer / ours: how many times as fast."""
    return _row(what, ours, peer, [b / a for a, b in zip(ours, peer, strict=True)], "peer / ours", "higher", rest)


def smaller(what: str, ours: Sequence[float], peer: Sequence[float], **rest: Any) -> Row:
    """A row of times, sizes or counts, of which the ratio is ours / peer: which part of the peer's."""
    return _row(what, ours, peer, [a / b for a, b in zip(ours, peer, strict=True)], "ours / peer", "lower", rest)


def greater(what: str, ours: Sequence[float], peer: Sequence[float], **rest: Any) -> Row:
    """A row of rates, as tokens/s; the ratio is ours / peer."""
    return _row(what, ours, peer, [a / b for a, b in zip(ours, peer, strict=True)], "ours / peer", "higher", rest)


def _row(
    what: str,
    ours: Sequence[float],
    peer: Sequence[float],
    ratios: list[float],
    ratio_is: Literal["peer / ours", "ours / peer"],
    better: Literal["higher", "lower"],
    rest: dict[str, Any],
) -> Row:
    return Row(
        what=what,
        ours=statistics.median(ours),
        peer=statistics.median(peer),
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        num_turns=len(ratios),
        ratio_is=ratio_is,
        better=better,
        **rest,
    )


# --- the table ------------------------------------------------------------------------------------------------------

_HEAD = ("what", "ours", "peer", "ratio (spread)", "target", "met")


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    cells = [_HEAD, tuple("---" for _ in _HEAD), *(_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def plain_table(rows: Sequence[Row]) -> str:
    """The same for a terminal: columns that line up."""
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cells(row: Row) -> tuple[str, ...]:
    sign = {"higher": "≥", "lower": "≤"}[row.better]
    met = {None: "–", True: "yes", False: "NO"}[row.is_met]
    return (
        row.what,
        f"{number(row.ours)} {row.unit} ({row.ours_name})",
        f"{number(row.peer)} {row.unit} ({row.peer_name})",
        f"{number(row.ratio)} ({number(row.low)}..{number(row.high)}) {row.ratio_is}",
        "–" if row.target is None else f"{sign} {number(row.target)}",
        met,
    )


def number(value: float) -> str:
    """Three significant digits, at least two behind the point below 10."""
    if value and abs(value) < 0.1:
        return f"{value:.3f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


# --- where and how --------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Of what is measured; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "torch" in sys.modules:  # its own word says which build it is
        found["torch"] = str(sys.modules["torch"].__version__)
    return found


def hardware() -> str:
    """`2-core-x86`, or what a GPU calls itself: what times depend on, and nothing that names the machine."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name()).strip("-").lower()
    machine = platform.machine().lower()
    return f"{len(os.sched_getaffinity(0))}-core-{'x86' if machine in ('x86_64', 'amd64') else machine}"


def command() -> str:
    """The command that is running, as one would type it; where its results go changes none of them."""
    script = Path(sys.argv[0])
    shown = f"benchmarks/{script.name}" if script.parent.name == "benchmarks" else script.name
    left_out = {"--json", "--budget-s"}
    options = [o for before, o in zip(sys.argv, sys.argv[1:], strict=False) if not left_out & {before, o}]
    return " ".join(["python", shown, *options])


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0], allow_abbrev=False)
    made.add_argument("--quick", action="store_true", help="fewer turns, for `make bench`: about two minutes")
    made.add_argument("--tiny", action="store_true", help="tiny sizes: only shows that the script runs")
    made.add_argument("--budget-s", type=float, metavar="S", help="begin no turn that would end after S seconds")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results there, and FILE's .md beside it")
    return made


def turns_within(number: int, options: argparse.Namespace, *, share: float = 1.0) -> Iterator[int]:
    """0, 1, ... below `number`: as many turns as end within `share` of `options.budget_s`, but at least one."""
    longest, budget_s = 0.0, None if options.budget_s is None else share * options.budget_s
    for turn in range(number):
        began = time.perf_counter()
        if turn and budget_s is not None and began - _STARTED + longest > budget_s:
            print(f"{turn} of {number} turns fit into {budget_s:.0f} s", file=sys.stderr, flush=True)
            return
        yield turn
        longest = max(longest, time.perf_counter() - began)


def seconds_left(options: argparse.Namespace) -> float:
    """Of `options.budget_s`; infinite without one."""
    return float("inf") if options.budget_s is None else options.budget_s - (time.perf_counter() - _STARTED)


def default_json(name: str) -> Path:
    """Where results of a full run go: `benchmarks/results/<name>_<hardware>_<yyyymm>.json`."""
    return RESULTS / f"{name}_{hardware()}_{time.strftime('%Y%m')}.json"


# --- a benchmark as a program ---------------------------------------------------------------------------------------


def run(
    title: str, options: argparse.Namespace, measure: Callable[[argparse.Namespace], Findings], *, name: str
) -> int:
    """Measure, print the page, write `options.json`, by default of a full run that of `name`; the exit code.

    A difference between systems is 1, and then the file says so and has no rows. A missed target is 0: it is in the
    table. Whatever else goes wrong is 2: its traceback is printed, and no file is written.
    """
    if options.json is None and not (options.quick or options.tiny):
        options.json = default_json(name)
    started = time.perf_counter()
    code = DONE
    try:
        found = measure(options)
    except ParityError as error:
        print(f"PARITY FAILED: {error}", file=sys.stderr)
        code, found = PARITY_FAILED, Findings(Parity(error.what, error.difference, error.limit, agrees=False), [])
    except Exception:  # noqa: BLE001 - Python's own code, 1, would say that parity failed
        traceback.print_exc()
        return NOT_RUN
    document = {
        "title": title,
        "command": command(),
        "hardware": hardware(),
        "versions": versions(),
        "seconds": round(time.perf_counter() - started, 1),
        "parity": dataclasses.asdict(found.parity),
        "rows": [dataclasses.asdict(row) | {"is_met": row.is_met} for row in found.rows],
        "details": found.details,
    }
    page = markdown_page(document, found.page)
    print(page, flush=True)
    if options.json is not None:
        write(options.json, json.dumps(document, indent=1) + "\n")
        write(options.json.with_name(f"{options.json.name.removesuffix('.json')}.md"), page)
    return code


def rows_of(document: dict[str, Any]) -> list[Row]:
    """The rows of a results file."""
    names = {field.name for field in dataclasses.fields(Row)}
    return [Row(**{name: value for name, value in row.items() if name in names}) for row in document["rows"]]


def markdown_page(document: dict[str, Any], rest: str = "") -> str:
    """The page of one benchmark."""
    parity = document["parity"]
    off = (
        "" if parity["difference"] is None else f": at most {parity['difference']:.0e} off, limit {parity['limit']:.0e}"
    )
    lines = [
        f"# {document['title']}",
        "",
        f"- command: `{document['command']}`, {document['seconds']:.0f} s",
        f"- hardware: {document['hardware']}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in document['versions'].items())}",
        f"- parity{'' if parity['agrees'] else ' FAILED'}: {parity['what']}{off}",
    ]
    if document["rows"]:
        lines += ["", markdown_table(rows_of(document))]
    return "\n".join(lines) + "\n" + (f"\n{rest.strip()}\n" if rest else "")


def write(path: Path, text: str) -> None:
    """The whole text or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
