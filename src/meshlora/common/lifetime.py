"""How a process begins and ends: libraries, Ctrl-C before there is work, and that none outlives its parent.

Owns: the end of a rank whose launcher is gone, by whatever signal, and of the folders that it leaves. Imports nothing
heavy by itself: a rank calls it first, as all other imports take seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5
# Ends with the first line, which comes when the folders are gone already; without one it ends with this process. Others
# are killed in the same moment, and may be about to write.
_JANITOR = 'read -r _ && exit; for _ in 1 2 3 4 5 6 7 8; do rm -rf -- "$@"; sleep 0.5; done'


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


class Janitor:
    """A process that removes `folders` when this one is gone, by whatever signal; they need not be there yet."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "meshlora-janitor", *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def is_there(self) -> bool:
        """Nobody has ended it."""
        return self._process.poll() is None

    def dismiss(self) -> None:
        """The folders are gone, or stay: end it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"done\n")
            self._process.stdin.close()
        self._process.wait()


def import_libraries() -> None:
    """Import peft, and with it torch and transformers, without the garbage collector.

    It would look again and again through objects that stay.
    """
    if "peft" not in sys.modules:
        gc.disable()
        import peft  # noqa: F401

        gc.freeze()
        gc.enable()


def note_interrupts(seen: list[int]) -> None:
    """From here on `seen` grows when Ctrl-C is pressed, which still raises KeyboardInterrupt.

    While a command only imports its libraries it ends this process on the spot: nothing has been begun, and a library
    may swallow the exception, turn it into another, or abort the interpreter's own way out (torch, half imported).
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if _only_imports(frame):
            os.write(sys.stderr.fileno(), b"interrupted\n")
            os._exit(130)
        raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def _only_imports(frame: FrameType | None) -> bool:
    """Whether what the command line itself has called is an import, rather than any work that imports something."""
    called = ""
    while frame is not None:
        if frame.f_globals.get("__name__") in ("meshlora.cli.main", __name__):
            return called.startswith("importlib.")
        called = frame.f_globals.get("__name__", "")
        frame = frame.f_back
    return False
