"""Start and end of a process: library imports, early Ctrl-C, and no rank outliving its launcher.

Folders left behind are removed. Imports nothing heavy: a rank calls it before all other imports, which take seconds.
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
# Whose modules are the command line.
_COMMANDS = ("meshlora.cli.", "meshlora_extra.commands.")
# A first line tells it that the folders are gone already; end of file, that this process has ended. It removes them for
# four seconds, because other processes killed at the same moment may still be writing. A scheduler signals every
# process of a job, this one too.
_JANITOR = (
    'trap "" INT TERM HUP USR1 USR2; read -r _ && exit; for _ in 1 2 3 4 5 6 7 8; do rm -rf -- "$@"; sleep 0.5; done'
)


def end_with(parent: int) -> None:
    """Kill this process by SIGKILL when its parent, process `parent`, ends.

    On Linux the kernel does it, even while this process is stopped or blocked in a library. Elsewhere a thread polls.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="lifetime").start()
    _end_if_orphan(parent)  # it may have ended before the call above


def _watch(parent: int) -> None:
    while True:
        time.sleep(_LOOK_S)
        _end_if_orphan(parent)


def _end_if_orphan(parent: int) -> None:
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Janitor:
    """A process that removes `folders` after this one has ended, by whatever signal; they need not exist yet."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "meshlora-janitor", *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def is_there(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def dismiss(self) -> None:
        """End it without removing the folders."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"done\n")
            self._process.stdin.close()
        self._process.wait()


def import_libraries() -> None:
    """Import peft, and with it torch and transformers, without the garbage collector.

    It would scan again and again objects that are never freed.
    """
    if "peft" not in sys.modules:
        gc.disable()
        import peft  # noqa: F401

        gc.freeze()
        gc.enable()


def note_interrupts(seen: list[int]) -> None:
    """Record each later Ctrl-C in `seen`; it still raises KeyboardInterrupt.

    While a command is only importing libraries, Ctrl-C ends the process at once: no work has begun, and a library may
    swallow the exception, turn it into another, or abort the interpreter's shutdown (torch, half imported).
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
    """Whether the command line is itself importing, as opposed to doing work that imports something."""
    called = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == __name__ or name.startswith(_COMMANDS):
            return called.startswith("importlib")
        called = name
        frame = frame.f_back
    return False
