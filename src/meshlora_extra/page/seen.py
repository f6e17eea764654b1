"""What the live page shows of runs: their numbers and samples, read from files that they are still writing.

Does not own: the requests (`meshlora_extra.page.server`), recording (`run.watch.metrics`).

Files are data of anybody: only finite numbers under known names, and texts of limited length, are handed on.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
# Of the steps of a run that is not chosen; of one that is; of an evaluation.
_OF_OTHERS = ("step", "steps", "loss")
_STEP = (*_OF_OTHERS, "lr", "grad_norm", "tokens", "step_time_s", "planned_step_time_s", "peak_memory_bytes")
_EVALUATION = ("step", "eval_loss")
# Metrics on answers have names of a user's own.
_METRIC, _MOST_METRICS = re.compile(r"eval_(?!(?:loss|tokens|perplexity|answers)$)[A-Za-z_]\w{0,59}", re.ASCII), 12
_MOST_RUNS, _MOST_POINTS, _MOST_SAMPLES, _LONGEST = 40, 1500, 8, 2000
# Read of a file, from its end: a million steps of 200 bytes are more than a page can show.
_MOST_BYTES, _MOST_SAMPLE_BYTES = 32 * 2**20, 2**18


class Runs:
    """The runs in `folder` and its subfolders. Keeps what it has read of files that have not changed since."""

    def __init__(self, folder: Path, *, first: str = "") -> None:
        """first: the run that is shown if none is asked for; else the one written last."""
        self.folder, self.first = folder, first
        self._lock = threading.Lock()  # pages ask at once, and each file is read once
        self._read: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def names(self) -> list[str]:
        """Of the runs, the one written last first. A name is a path in `folder`; "." is that itself."""
        found: list[tuple[float, str]] = []
        for file in [self.folder / METRICS, *self.folder.glob(f"*/{METRICS}"), *self.folder.glob(f"*/*/{METRICS}")]:
            status = _status(file)
            if status is not None:
                found.append((status.st_mtime, str(file.parent.relative_to(self.folder))))
        return [name for _, name in sorted(found, reverse=True)[:_MOST_RUNS]]

    def shown(self, name: str | None) -> dict[str, Any]:
        """The values of the page: every run with its loss, and all of `name`, unless that is not among `names`."""
        names = self.names()
        chosen = next((each for each in (name, self.first, *names[:1]) if each in names), None)
        runs = [{"name": each, **self._numbers(each, is_chosen=each == chosen)} for each in names]
        samples = _samples(self.folder / chosen / SAMPLES) if chosen is not None else []
        return {"chosen": chosen, "runs": runs, "samples": samples, "now": time.time()}

    def _numbers(self, name: str, *, is_chosen: bool) -> dict[str, Any]:
        file = self.folder / name / METRICS
        status = _status(file)
        if status is None:
            return {"steps": [], "evaluations": [], "written": 0.0}
        mark = (status.st_size, status.st_mtime_ns)  # a line more changes both
        with self._lock:
            known = self._read.get(file)
            if known is None or known[0] != mark:
                self._read[file] = known = (mark, _numbers(file))
        steps, evaluations = known[1]["steps"], known[1]["evaluations"]
        if not is_chosen:
            steps = [{key: step[key] for key in _OF_OTHERS if key in step} for step in steps]
        return {"steps": steps, "evaluations": evaluations, "written": status.st_mtime}


def _status(file: Path) -> os.stat_result | None:
    """Of a regular file, not behind a link, which could point anywhere."""
    try:
        found = file.lstat()
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _lines(file: Path, *, most_bytes: int) -> list[dict[str, Any]]:
    """The whole lines of a file that are JSON objects, of its last `most_bytes`."""
    try:
        with file.open("rb") as opened:
            start = max(0, opened.seek(0, os.SEEK_END) - most_bytes)
            opened.seek(start)
            content = opened.read(most_bytes)
    except OSError:
        return []
    found = []
    for line in content.split(b"\n")[bool(start) : -1]:  # what comes after the last end of line is being written
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _numbers(file: Path) -> dict[str, list[dict[str, float]]]:
    steps, evaluations = [], []
    for line in _lines(file, most_bytes=_MOST_BYTES):
        if "eval_loss" in line:
            metrics = [name for name in line if _METRIC.fullmatch(name)][:_MOST_METRICS]
            evaluations.append(_finite(line, (*_EVALUATION, *metrics)))
        elif "eval_tokens" not in line:  # else an evaluation whose loss was not finite
            steps.append(_finite(line, _STEP))
    steps, evaluations = ([one for one in each if "step" in one] for each in (steps, evaluations))
    return {"steps": _thinned(steps), "evaluations": _thinned(evaluations)}


def _finite(line: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, float]:
    return {name: line[name] for name in names if _is_finite(line.get(name))}


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)  # first: a whole number may be beyond all floats


def _thinned(points: list[dict[str, float]]) -> list[dict[str, float]]:
    """At most `_MOST_POINTS` of them, evenly, the last among them."""
    every = -(-len(points) // _MOST_POINTS)
    if every <= 1:
        return points
    return [*points[:-1:every], points[-1]]


def _samples(file: Path) -> list[dict[str, Any]]:
    """The last texts of a run, the newest first."""
    if _status(file) is None:
        return []
    found = []
    for line in reversed(_lines(file, most_bytes=_MOST_SAMPLE_BYTES)[-_MOST_SAMPLES:]):
        step, prompt, text = map(line.get, ("step", "prompt", "text"))
        if _is_finite(step) and isinstance(prompt, str) and isinstance(text, str):
            found.append({"step": step, "prompt": prompt[-_LONGEST:], "text": text[:_LONGEST]})
    return found
