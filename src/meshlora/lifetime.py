"""That a process does not outlive the one that started it.

Owns: the end of a rank whose launcher is gone, by whatever signal. Imports nothing heavy: a rank calls it first, as all
other imports take seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5


def end_with(parent: int) -> None:
    """From here on this process ends, by SIGKILL, when its parent does, process number `parent`.

    On Linux the kernel sees to it, also while this process is stopped or waits in a library. Elsewhere a thread looks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="lifetime").start()
    _end_if_orphan(parent)  # it may have ended before we asked


def _watch(parent: int) -> None:
    while True:
        time.sleep(_LOOK_S)
        _end_if_orphan(parent)


def _end_if_orphan(parent: int) -> None:
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
