"""A time limit in this process, for regular expressions and code of strangers.

Does not own: limits of memory, and of calls that no signal ends (`meshlora_ground.apart`).
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

_AGAIN_S = 0.1


class OutOfTimeError(Exception):
    """The block inside `time_limit` took too long."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the block after `seconds` of wall time, Python code and regular expressions alike.

    By SIGALRM, hence only in the main thread: elsewhere there is no limit. An alarm that the caller had set is restored
    after the block. Cyclic garbage is collected after the block, too: what a callback of the collector raises is lost.

    Raises:
        OutOfTimeError: it took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_: int, __: FrameType | None) -> None:
        raise OutOfTimeError

    collects = gc.isenabled()
    gc.disable()
    handler = signal.signal(signal.SIGALRM, end)
    # Again and again: a finalizer loses what is raised in it.
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds, max(seconds, _AGAIN_S))
    begun = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if collects:
            gc.enable()
        if left_s:  # the caller's alarm; one that is overdue fires at once
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, left_s - (time.monotonic() - begun)), interval_s)
