"""How long what a stranger wrote may run, and in how much memory: templates, patterns.

Owns: ending a computation in this process by the clock (`time_limit`), and working in a forked copy of it that is gone
afterwards (`each_apart`). Does not own: the work, or what is said of its failure.

A limit inside this process cannot end a call into C that asks for gigabytes at once, or that compares nested lists for
hours. The kernel ends a process whatever it does. A fork costs some milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import TypeVar

from meshlora.common.errors import UserError, reason

Item = TypeVar("Item")


class OutOfTimeError(Exception):
    """What ran inside `time_limit` took too long."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the block after `seconds` of wall time, Python code and regular expressions alike.

    By SIGALRM, hence in the main thread only: elsewhere the block runs as long as it likes. An alarm of the caller's
    goes on after the block.

    Raises:
        OutOfTimeError: it took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_: int, __: FrameType | None) -> None:
        raise OutOfTimeError

    handler = signal.signal(signal.SIGALRM, end)
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds)
    begun = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:  # one that is late by now comes at once
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, left_s - (time.monotonic() - begun)), interval_s)


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
    results, into = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        # Of forks beside threads: the copy needs none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            results.close()
            _work_through(work, items, into, seconds=seconds, memory_bytes=memory_bytes)
        finally:
            os._exit(1)  # past every `finally` and buffer of the process that was copied
    into.close()
    status, failure = None, None
    try:
        with results:
            for _ in items:
                try:
                    kind, value = json.loads(results.recv_bytes())
                except (EOFError, OSError):
                    _, status = os.waitpid(child, 0)
                    is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
                    failure = f"it takes longer than {seconds:g} s" if is_late else "it ended its process"
                    break
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
    work: Callable[[Item], object], items: Sequence[Item], into: Connection, *, seconds: float, memory_bytes: int
) -> None:
    # What other processes are sent, or the terminal sends to all, is for the process that was copied: it ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    gc.freeze()  # looking through the objects of the other process would copy all its memory
    _limit_memory(memory_bytes)
    for item in items:
        # Its default action ends the process, in C as in Python, also where nobody reads any more.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        content = _result(work, item)
        signal.setitimer(signal.ITIMER_REAL, 0)
        into.send_bytes(content)


def _result(work: Callable[[Item], object], item: Item) -> bytes:
    try:
        return json.dumps(["found", work(item)], ensure_ascii=False).encode()
    except UserError as error:
        return json.dumps(["refused", [error.given, error.rule, error.way_out]]).encode()
    except MemoryError:
        return json.dumps(["failed", "it needs too much memory"]).encode()
    except Exception as error:  # noqa: BLE001 - a stranger's code may raise anything
        return json.dumps(["failed", reason(error)]).encode()


def _limit_memory(more_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/statm")
    if not status.exists():  # not Linux: the time is limited all the same
        return
    limit = int(status.read_text().split()[0]) * resource.getpagesize() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
