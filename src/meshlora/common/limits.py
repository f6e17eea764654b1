"""How long what a stranger wrote may run: templates, patterns.

Owns: ending a computation in this process by the clock. Does not own: what is said of it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType


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
