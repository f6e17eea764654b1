"""Work on what a stranger wrote, in a forked copy of this process: bounded in time and memory, and gone afterwards.

Owns: the process, its limits, the pipe of its results. Does not own: the work, or what is said of its failure.

A limit inside this process (`common.limits.time_limit`) cannot end a call into C that asks for gigabytes at once, or
that compares nested lists for hours. The kernel ends a process whatever it does. A fork costs some milliseconds.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from meshlora.common.errors import UserError, reason

Item = TypeVar("Item")


@dataclass(frozen=True)
class Failed:
    """There is no result, nor one of any later item. reason: in words."""

    reason: str


def each_apart(
    work: Callable[[Item], object], items: Sequence[Item], *, seconds: float, memory_bytes: int
) -> Generator[object]:
    """`work(item)` of each item, in order, as JSON has it (a tuple comes back as a list).

    The work sees this process as it is now and cannot change it. One that raises, takes longer than `seconds` or needs
    `memory_bytes` more than this process has ends it all: the last result is then a `Failed`. Close the generator where
    not all of it is wanted: that ends the copy.

    Raises:
        UserError: what the work raised as one.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # Of forks beside threads: the copy needs none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            _work_through(work, items, write_end, seconds=seconds, memory_bytes=memory_bytes)
        finally:
            os._exit(1)  # past every `finally` and buffer of the process that was copied
    os.close(write_end)
    status, failure = None, None
    try:
        with open(read_end, "rb") as results:
            for _ in items:
                size = results.read(8)
                content = results.read(int.from_bytes(size, "little"))
                if len(size) < 8 or len(content) < int.from_bytes(size, "little"):
                    _, status = os.waitpid(child, 0)
                    is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
                    failure = f"it takes longer than {seconds:g} s" if is_late else "it ended its process"
                    break
                kind, value = json.loads(content)
                if kind == "refused":
                    raise UserError(*value)
                if kind == "failed":
                    failure = value
                    break
                yield value
    finally:
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if failure is not None:
        yield Failed(failure)


def _work_through(
    work: Callable[[Item], object], items: Sequence[Item], pipe: int, *, seconds: float, memory_bytes: int
) -> None:
    # What other processes are sent, or the terminal sends to all, is for the process that was copied: it ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    gc.freeze()  # looking through the objects of the other process would copy all its memory
    _limit_memory(memory_bytes)
    with open(pipe, "wb") as results:
        for item in items:
            # Its default action ends the process, in C as in Python, also where nobody reads any more.
            signal.setitimer(signal.ITIMER_REAL, seconds)
            content = _result(work, item)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send(results, content)


def _result(work: Callable[[Item], object], item: Item) -> bytes:
    try:
        return json.dumps(["found", work(item)], ensure_ascii=False).encode()
    except UserError as error:
        return json.dumps(["refused", [error.given, error.rule, error.way_out]]).encode()
    except MemoryError:
        return json.dumps(["failed", "it needs too much memory"]).encode()
    except Exception as error:  # noqa: BLE001 - a stranger's code may raise anything
        return json.dumps(["failed", reason(error)]).encode()


def _send(results: BinaryIO, content: bytes) -> None:
    results.write(len(content).to_bytes(8, "little"))
    results.write(content)
    results.flush()


def _limit_memory(more_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/statm")
    if not status.exists():  # not Linux: the time is limited all the same
        return
    limit = int(status.read_text().split()[0]) * resource.getpagesize() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
