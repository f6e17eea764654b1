"""What a run says about itself: `metrics.jsonl`, and a progress bar or lines on the terminal. Rank 0 only.

Owns: the record of a step and where it is shown. Does not own: how the numbers come about (`train.trainer`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshlora.state.files import write_atomically


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, over all ranks.

    Attributes:
        step: from 1. loss: mean over the trained tokens. grad_norm: global, before clipping.
        tokens: trained tokens of the step. step_time_s: wall time on rank 0.
        aux_loss: of load balancing, before its coefficient; None where it is off.
        means: what the objective reports besides, by name.
        loss_scale, skipped: of float16: the scale of the next step, the steps so far whose gradient overflowed.
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
    skipped: int | None = None


class Reporter:
    """Writes metrics as they come; a context manager that leaves the terminal as it was. Silent off rank 0."""

    def __init__(
        self, file: Path, *, steps: int, log_every: int, is_main: bool, console: Console | None = None, done: int = 0
    ) -> None:
        """done: steps that the run goes on from; what `file` says of later ones is forgotten."""
        self.console = console or Console()
        self.is_main, self.log_every, self.steps = is_main, log_every, steps
        self._file: IO[str] | None = None
        self._path, self._done = file, done
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=self.console,
            transient=False,
            disable=not (is_main and self.console.is_terminal),
        )
        self._task = self._progress.add_task("train", total=steps, loss=float("nan"), speed=0.0)

    def __enter__(self) -> Self:
        if self.is_main:
            kept = _lines_until(self._path, self._done)
            write_atomically(self._path, lambda path: _write_lines(path, kept))
            self._file = self._path.open("a", encoding="utf-8", buffering=1)  # a line is on disk as soon as it is said
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._file is not None:
            self._file.close()

    def step(self, metrics: StepMetrics) -> None:
        """Record one step."""
        if self._file is None:
            return
        values = {name: value for name, value in dataclasses.asdict(metrics).items() if name != "means"}
        # The norm of a step that was skipped is no number, and has no place in JSON.
        shown = {n: v for n, v in {**values, **metrics.means}.items() if v is not None and math.isfinite(v)}
        self._write(shown)
        speed = metrics.tokens / max(metrics.step_time_s, 1e-9)
        self._progress.update(self._task, completed=metrics.step, loss=metrics.loss, speed=speed)
        is_due = metrics.step % self.log_every == 0 or metrics.step in (1, self.steps)
        if is_due and not self.console.is_terminal:
            self.say(
                f"step {metrics.step}/{self.steps}  loss {metrics.loss:.4f}  lr {metrics.lr:.2e}"
                f"  grad_norm {metrics.grad_norm:.3f}  {speed:,.0f} tokens/s"
            )

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        """Record the loss on the held-out file."""
        if self._file is not None:
            self._write({"step": step, "eval_loss": loss, "eval_tokens": tokens})
            self.say(f"step {step}/{self.steps}  eval loss {loss:.4f}")

    def say(self, text: str) -> None:
        """One line on rank 0's terminal."""
        if self.is_main:
            self.console.print(text, highlight=False, soft_wrap=True)

    def _write(self, values: dict[str, object]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(values) + "\n")


def _lines_until(file: Path, done: int) -> list[str]:
    """Whole lines of `file` about the first `done` steps; none where there is no such file."""
    if not done or not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= done]


def _write_lines(file: Path, lines: list[str]) -> None:
    file.write_text("".join(lines), encoding="utf-8")
