"""A command in a pseudo-terminal, as a shell starts it: keys are typed, and what is shown is read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Self

CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """`python -m meshlora WORDS` as the foreground process of a terminal of its own. A context manager."""

    def __init__(self, *words: str, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.shown = ""

        def enter() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshlora", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=os.environ | {"TERM": "dumb", "COLUMNS": "200", "INPUTRC": os.devnull},
            start_new_session=True,
            preexec_fn=enter,
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)

    def type(self, keys: str | bytes) -> None:
        """keys: a line, which Enter ends; or bytes as they are."""
        os.write(self._ours, f"{keys}\n".encode() if isinstance(keys, str) else keys)

    def until(self, text: str, timeout_s: float = 120.0) -> str:
        """What is shown up to the next `text`, and with it; it is taken away."""
        deadline = time.monotonic() + timeout_s
        while text not in self.shown:
            assert time.monotonic() < deadline, (text, self.shown)
            assert self._read() or self.process.poll() is None, (text, self.shown)
        found, _, self.shown = self.shown.partition(text)
        return found + text

    def end(self, timeout_s: float = 60.0) -> int:
        """Its exit code, once it has ended."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self._read()
            assert time.monotonic() < deadline, self.shown
        while self._read():
            pass
        return self.process.returncode

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], 0.1)[0]:
            return False
        try:
            found = os.read(self._ours, 4096)
        except OSError:  # nobody has it open
            return False
        self.shown += found.decode("utf-8", "replace").replace("\r", "")
        return bool(found)
