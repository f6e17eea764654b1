"""Reports of a run, on rank 0: `metrics.jsonl`, trackers, and progress bars or lines on the terminal.

Owns: the record of a step and where it is shown. Does not own: computing the numbers (`run.trainer`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshlora.run.mismatch import OF_FILE
from meshlora.run.watch.tracking import Tracker, tracked
from meshlora_ground.console import Console
from meshlora_ground.errors import SaveError
from meshlora_ground.files import write_atomically
from meshlora_ground.slow_paths import SlowPath


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, over all ranks.

    Attributes:
        step: from 1. loss: mean over the trained tokens. grad_norm: global, before clipping.
        tokens: trained tokens of the step. step_time_s: wall time on rank 0.
        aux_loss: of load balancing, before its coefficient; None if it is off.
        means: other statistics of the objective, by name.
        loss_scale: of the next step, in float16.
        skipped: the step changed nothing, as its loss or gradient was not finite.
        peak_memory_bytes: of rank 0 since its start: of tensors on a GPU, or of the process.
        slow_paths: that no step before has taken, on any rank.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    step_time_s: float
    aux_loss: float | None = None
    means: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float | None = None
    skipped: bool = False
    peak_memory_bytes: int | None = None
    slow_paths: Sequence[SlowPath] = ()


@dataclass(frozen=True)
class Planned:
    """The planner's step, to be shown beside the one that is seen.

    Attributes:
        step_time_s: of an optimizer step. words: on what it stands. parts_s: of what it is made.
    """

    step_time_s: float
    words: str
    parts_s: Mapping[str, float] = field(default_factory=dict)


# Steps that are left out of what is seen: memory is touched and connections are opened in them.
_WARM_UP = 2


class Reporter:
    """Writes metrics as they come; a context manager that leaves the terminal as it was. Silent off rank 0.

    planned: the planner's step, if there is one; slow_paths: those known by now. Both are set before the first step.
    """

    planned: Planned | None = None
    slow_paths: Sequence[SlowPath] = ()

    def __init__(
        self,
        file: Path,
        *,
        steps: int,
        log_every: int,
        is_main: bool,
        console: Console | None = None,
        done: int = 0,
        goes_on_without: bool = False,
        trackers: Sequence[Tracker] = (),
        name: str = "",
    ) -> None:
        """done: steps done before this run; lines of `file` about later ones are dropped.

        goes_on_without: skip, with a message, lines that cannot be written, as on a full disk.
        trackers: get every line of `file` too.
        name: of one of several adapters: prefix of all messages; lines are shown instead of bars.
        """
        self._goes_on_without, self._has_failed = goes_on_without, False
        self._trackers, self._name = trackers, name
        self.console = console or Console()
        self.is_main, self.log_every, self.steps = is_main, log_every, steps
        self._file: IO[bytes] | None = None
        self._path, self._done = file, done
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[shown]}", markup=False),
            TimeRemainingColumn(),
            TextColumn("left", markup=False),
            console=self.console,
            transient=False,
            disable=bool(name) or not (is_main and self.console.is_terminal),
        )
        self._task = self._progress.add_task("step", total=steps, completed=done, shown="")
        self._saved = ""
        self._times_s: list[float] = []

    def __enter__(self) -> Self:
        if self.is_main:
            kept, num_damaged = lines_until(self._path, self._done)
            write_atomically(self._path, lambda path: path.write_bytes(b"".join(kept)))
            self._file = self._path.open("ab", buffering=0)  # unbuffered: each line is on disk at once
            self._progress.start()
            if num_damaged:
                self.say(f"{self._path}: {num_damaged} damaged lines are left out")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()  # first: it writes to the terminal until then
        if self._file is not None:
            self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def step(self, metrics: StepMetrics) -> None:
        """Record one step."""
        if self._file is None:
            return
        values = {name: value for name, value in vars(metrics).items() if name not in ("means", "slow_paths")}
        values["steps"] = self.steps  # in every line: the live page may read the end of the file alone
        for path in metrics.slow_paths:
            self.say(f"slow path: {path}")
        if slow := [*map(str, (*self.slow_paths, *metrics.slow_paths))]:
            values["slow_paths"], self.slow_paths = slow, ()
        timed = ""
        if self.planned is not None:
            self._times_s.append(metrics.step_time_s)
            values["planned_step_time_s"] = self.planned.step_time_s
            timed = f"  {_time(metrics.step_time_s)} (planned {_time(self.planned.step_time_s)})"
        self._write({**values, **metrics.means})
        speed = metrics.tokens / max(metrics.step_time_s, 1e-9)
        means = "".join(f"  {name} {value:.4g}" for name, value in metrics.means.items() if name not in OF_FILE)
        skipped = "  left out" if metrics.skipped else ""
        shown = f"loss {metrics.loss:.4f}{means}  {speed:,.0f} tokens/s{skipped}{self._saved}"
        self._progress.update(self._task, completed=metrics.step, shown=shown)
        is_due = metrics.step % self.log_every == 0 or metrics.step in (1, self.steps)
        if is_due:  # on a terminal above the bar, so that the run's course can be scrolled back to
            self.say(
                f"step {metrics.step}/{self.steps}  loss {metrics.loss:.4f}{means}  lr {metrics.lr:.2e}"
                f"  grad_norm {metrics.grad_norm:.3f}  {speed:,.0f} tokens/s{timed}{skipped}"
            )

    def evaluation(
        self,
        step: int,
        loss: float,
        tokens: int,
        *,
        perplexity: float | None = None,
        means: Mapping[str, float] | None = None,
        answers: int | None = None,
    ) -> None:
        """Record the loss on held-out data. Values that are not finite are left out: JSON has none.

        means: other statistics, by name. answers: number of those that metrics among them are of.
        """
        if self._file is None:
            return
        values: dict[str, object] = {"step": step, "eval_loss": loss, "eval_tokens": tokens}
        shown = ""
        if perplexity is not None and math.isfinite(perplexity):
            values["eval_perplexity"] = perplexity
            shown = f"  perplexity {perplexity:.3f}"
        for name, value in (means or {}).items():
            values[f"eval_{name}"] = value
            shown += f"  {name} {value:.4f}"
        if answers is not None:
            values["eval_answers"] = answers
        self._write(values)
        self.say(f"step {step}/{self.steps}  eval loss {loss:.4f}{shown}")

    @contextlib.contextmanager
    def doing(self, what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show a second progress bar during the block. Yields a function to call after each of `total` parts."""
        task = self._progress.add_task(what, total=total, shown="")
        try:
            yield lambda: self._progress.advance(task)
        finally:
            self._progress.remove_task(task)

    def saved(self, step: int) -> None:
        """Show from the next step on that the checkpoint of `step` is saved."""
        self._saved = f"  saved {step}"

    def compare_with_plan(self) -> None:
        """Say how long steps were planned to take, and took: the median, without the first two."""
        times = self._times_s[_WARM_UP:]
        if self.planned is None or not times:
            return
        planned_s, seen_s = self.planned.step_time_s, statistics.median(times)
        parts = ", ".join(f"{name} {_time(part)}" for name, part in self.planned.parts_s.items() if part > 0)
        self.say(
            f"planned {_time(planned_s)} a step, seen {_time(seen_s)}: {seen_s / planned_s:.2f} x the plan ({parts})"
        )

    def say(self, text: str) -> None:
        """Print one line on rank 0's terminal."""
        if self.is_main:
            self.console.say(f"{self._name}: {text}" if self._name else text)

    def _write(self, values: dict[str, object]) -> None:
        assert self._file is not None
        values = {name: value for name, value in values.items() if _is_value(value)}
        for tracker in self._trackers:
            tracker.log(*tracked(values))
        line = (json.dumps(values) + "\n").encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)  # no half line between whole ones
            text = f"{self._path}: a line could not be written ({error.strerror or error})"
            if not self._goes_on_without:
                raise SaveError(text) from error
            if not self._has_failed:
                self.say(text)
            self._has_failed = True


def _time(time_s: float) -> str:
    return f"{time_s:.2f} s" if time_s >= 1 else f"{1000 * time_s:.0f} ms"


def _is_value(value: object) -> bool:
    """Whether to write a value: None, False, and non-finite numbers, which JSON lacks, are left out."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is not None and value is not False


def last_values(file: Path) -> dict[str, object]:
    """The last value of each name in `file`, evaluations included; empty if there is no such file."""
    values: dict[str, object] = {}
    for record in records_until(file, sys.maxsize):
        values |= record
    return values


def records_until(file: Path, done: int) -> list[dict[str, Any]]:
    """The values of each of `lines_until`."""
    return [json.loads(line) for line in lines_until(file, done)[0]]


def lines_until(file: Path, done: int) -> tuple[list[bytes], int]:
    """(whole lines of `file` about the first `done` steps, number of damaged lines). A crash of the machine may leave
    damaged lines. Empty if there is no such file."""
    if not done or not file.is_file():
        return [], 0
    kept, num_damaged = [], 0
    for line in file.read_bytes().splitlines(keepends=True):
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            num_damaged += line.endswith(b"\n")  # the last line may be cut short if the run was killed
            continue
        if step <= done and line.endswith(b"\n"):
            kept.append(line)
    return kept, num_damaged
