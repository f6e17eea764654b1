"""Work in a forked copy of this process, with time and memory limits: chat templates and other code of strangers.

A limit inside this process (`meshlora_ground.limits`) cannot end a C call that allocates gigabytes at once or compares
nested lists for hours. The kernel can end a process whatever it is doing. A fork costs some milliseconds.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from meshlora_ground.errors import UserError, reason

Item = TypeVar("Item")


@dataclass(frozen=True)
class Failed:
    """No result for this item or any later one. reason: a sentence for the user."""

    reason: str


def each_apart(
    work: Callable[[Item], object], items: Sequence[Item], *, seconds: float, memory_bytes: int
) -> Generator[object]:
    """`work(item)` for each item, in order, passed through JSON (a tuple comes back as a list).

    The work sees a copy of this process and cannot change it. An item that raises, takes longer than `seconds` or needs
    `memory_bytes` more than this process has ends the whole: the last result is then a `Failed`. Close the generator to
    stop early: that ends the copy.

    Raises:
        UserError: raised by the work itself.
    """
    results, into = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        # About forking a process with threads: the copy needs none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            results.close()
            _work_through(work, items, into, seconds=seconds, memory_bytes=memory_bytes)
        finally:
            os._exit(1)  # without running any `finally` or flushing any buffer of the original process
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
    # A Ctrl-C reaches the whole foreground group: the original process handles it, and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    gc.freeze()  # scanning the inherited objects would copy all of their memory
    _limit_memory(memory_bytes)
    for item in items:
        # SIGALRM's default action ends the process even inside a C call, and even if nobody reads the results.
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
    if not status.exists():  # not Linux: only the time limit applies
        return
    now = int(status.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_AS, (min(now, most), hard))
    _take_holes()
    limit = min(now + more_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _take_holes() -> None:
    # What the original process freed would pass for memory that it still has, by the kernel's count.
    malloc = ctypes.CDLL(None).malloc
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    for exponent in range(33, 19, -1):  # 8 GiB to 1 MiB
        while malloc(2**exponent):  # not a page of it is touched
            pass
