"""Running the steps of `scripts/prove_on_gpu.py`: each a process of its own, with a limit of its own.

Owns: settings, steps and parts as data, which steps run at once, limits, what comes of a step that fails or hangs. Does
not own: which parts there are (`prove_on_gpu.py`), the file of results (`gpu_results.py`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import signal
import site
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_results import ROOT, Line, Status

TOTAL_S = 470.0  # and some to begin: eight minutes
TINY_LIMIT_S = 600.0  # of a step of a dry run: a slow machine is no fault
LEAST_S = 10.0  # no step that is not timed begins with less
FOUND, RUN, BUDGET = "{folder}/found.json", "{folder}/run", "{budget_s}"  # of a step, filled in where it starts
ENDING_S = 25.0  # of a benchmark: its imports, and what it does after the last turn that fits

Read = Callable[[Path], tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Setting:
    """Where a campaign runs. is_tiny: on the CPU, at sizes that only show that everything runs."""

    folder: Path
    is_tiny: bool

    @property
    def device(self) -> str:
        return "cpu" if self.is_tiny else "cuda"

    @property
    def at_once(self) -> int:
        """How many steps run at once, where none is timed: each starts some processes."""
        return max(2, min(8, len(os.sched_getaffinity(0)) // 2))

    def ranks(self, number: int = 2) -> list[str]:
        """Options for `number` ranks: on the one GPU, or on the CPU."""
        return ["--nproc", f"{number}", *([] if self.is_tiny else ["--ranks-per-gpu", f"{number}"])]

    def unless_tiny(self, reason: str) -> str:
        return reason if self.is_tiny else ""


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        read: what it found, in words and as plain values, from its folder, which has its `log`. good_codes: its exit
            codes without a fault. not_run: why it does not run here.
    """

    name: str
    argv: Sequence[str] = ()
    read: Read = lambda folder: ("", {})
    good_codes: tuple[int, ...] = (0,)
    not_run: str = ""


@dataclass(frozen=True)
class Part:
    """Some steps that show one thing.

    Attributes:
        limit_s: of each step, from its own start. is_timed: each step has the machine for itself.
        compare: a further line from those of the steps.
    """

    shows: str
    limit_s: float
    steps: Callable[[Setting], list[Step]]
    is_timed: bool = False
    compare: Callable[[list[Line]], Line] | None = None


@dataclass
class Campaign:
    """Runs steps, and hands each line to `keep`. total_s: for all of it."""

    setting: Setting
    keep: Callable[[Line], None]
    total_s: float = TOTAL_S
    began: float = field(default_factory=time.monotonic)
    running: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_stopped: bool = False

    def run(self, parts: dict[str, Part]) -> None:
        """All of `parts`. Whatever ends this ends the processes that it has started."""
        try:
            for wave in self._waves(parts):
                self._run_together(wave)
                for name in dict.fromkeys(name for name, _ in wave):
                    self._compare(name, parts[name])
        except BaseException:
            self._stop()
            raise

    def _waves(self, parts: dict[str, Part]) -> Iterator[list[tuple[str, Step]]]:
        """Steps that may run at once: nothing is timed in a dry run."""
        self.lines: dict[str, list[Line]] = {name: [] for name in parts}
        together, alone = list[tuple[str, Step]](), list[list[tuple[str, Step]]]()
        self.limits = {name: TINY_LIMIT_S if self.setting.is_tiny else part.limit_s for name, part in parts.items()}
        # Half of what a benchmark may take: with less it would be ended before its first number.
        self.least = {name: part.limit_s / 2 if part.is_timed else LEAST_S for name, part in parts.items()}
        for name, part in parts.items():
            try:
                steps = [(name, step) for step in part.steps(self.setting)]
            except Exception as error:  # noqa: BLE001 - no part ends another
                self._add(Line(name, "its steps", "failed", 0.0, f"{type(error).__name__}: {error}", is_fault=True))
                continue
            if part.is_timed and not self.setting.is_tiny:
                alone += [[step] for step in steps]
            else:
                together += steps
        yield from [together, *alone]

    def _run_together(self, wave: list[tuple[str, Step]]) -> None:
        with ThreadPoolExecutor(self.setting.at_once) as pool:
            try:
                for done in as_completed([pool.submit(self._line, name, step) for name, step in wave]):
                    self._add(done.result())
            except BaseException:
                self._stop()  # before the pool waits for its threads
                raise

    def _add(self, line: Line) -> None:
        self.lines[line.part].append(line)
        self.keep(line)

    def _compare(self, name: str, part: Part) -> None:
        if part.compare is None:
            return
        try:
            line = part.compare(self.lines[name])
        except Exception as error:  # noqa: BLE001 - no part ends another
            line = Line(name, "comparison", "failed", 0.0, f"{type(error).__name__}: {error}", is_fault=True)
        self._add(line)

    def _line(self, part: str, step: Step) -> Line:
        """Run a step; whatever comes of it is a line."""
        left_s = self.total_s - (time.monotonic() - self.began)
        if step.not_run or self.is_stopped:
            return Line(part, step.name, "not run", 0.0, step.not_run)
        if left_s < self.least[part]:
            return Line(part, step.name, "not run", 0.0, f"no time left of {self.total_s:.0f} s", is_fault=True)
        folder = self.setting.folder / f"{part}-{re.sub(r'[^a-z0-9]+', '-', step.name.lower())}"
        started, limit_s = time.monotonic(), min(self.limits[part], left_s)
        try:
            code = self._process(step, folder, limit_s)
            seconds = time.monotonic() - started
            if code is None:
                return Line(part, step.name, "timed out", seconds, _until_stopped(step, folder, limit_s), is_fault=True)
            return _read(part, step, folder, code, seconds)
        except Exception as error:  # noqa: BLE001 - no part ends another
            found = f"{type(error).__name__}: {error}"
            return Line(part, step.name, "failed", time.monotonic() - started, found, is_fault=True)

    def _process(self, step: Step, folder: Path, limit_s: float) -> int | None:
        """The exit code of `step`; None after `limit_s`. Its home is empty, as a new user's; its log is in `folder`."""
        folder.mkdir(parents=True)
        filled = {"{folder}": str(folder), BUDGET: f"{max(1.0, limit_s - ENDING_S):.0f}"}
        argv = [functools.reduce(lambda text, key: text.replace(key, filled[key]), filled, word) for word in step.argv]
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
        env["PYTHONUSERBASE"] = site.getuserbase()  # packages may be in the home of who started this
        # Of all steps, and of the next campaign: each kernel is compiled once.
        env["TRITON_CACHE_DIR"] = str(self.setting.folder.parent / "triton")
        env |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        (folder / "home").mkdir()
        with (folder / "log").open("w") as log:
            log.write(f"{shlex.join(argv)}\n")
            log.flush()
            # A session of its own: a step that is stopped takes its ranks with it.
            with self.lock:
                how: dict[str, Any] = {"cwd": ROOT, "env": env, "start_new_session": True}
                process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **how)
                self.running.add(process.pid)
            try:
                return process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _kill(process.pid)
                process.wait()
                with self.lock:
                    self.running.discard(process.pid)

    def _stop(self) -> None:
        self.is_stopped = True
        with self.lock:
            for pid in self.running:
                _kill(pid)


def _kill(session: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def _until_stopped(step: Step, folder: Path, limit_s: float) -> str:
    """What a step has left that ran out of time."""
    try:
        found, _ = step.read(folder)
    except Exception:  # noqa: BLE001 - what is half written may be anything
        found = ""
    return f"more than {limit_s:.0f} s; " + (found or f"its last line: {read_last(folder)[0]}")


def _read(part: str, step: Step, folder: Path, code: int, seconds: float) -> Line:
    """The line of a step that has ended: what it wrote, or the last line of its log."""
    is_good = code in step.good_codes
    try:
        found, data = step.read(folder)
    except Exception as error:  # noqa: BLE001 - what a failed step leaves may be anything
        found, data = "", {}
        if is_good:
            found, is_good = f"what it left cannot be read: {type(error).__name__}: {error}", False
    if code not in step.good_codes:
        found = "\n".join(filter(None, [f"exit code {code}: {read_last(folder)[0]}", found]))
    status: Status = "ok" if is_good else "failed"
    found = found.replace(f"{folder}", "FOLDER")
    return Line(part, step.name, status, seconds, found, data, is_fault=not is_good)


def read_last(folder: Path) -> tuple[str, dict[str, Any]]:
    """Its last line."""
    lines = [line.strip() for line in (folder / "log").read_text("utf-8", "replace").splitlines() if line.strip()]
    return (lines[-1][:200] if lines else ""), {}
