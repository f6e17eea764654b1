"""Finding what a command that a test has started leaves behind: processes and folders."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from socketserver import BaseServer
from typing import Self

MEMORY = Path("/dev/shm")


class Started:
    """A process of the test's, with a home and a folder for temporary files of its own under `folder`.

    A context manager: whatever the test finds, nothing of it is left.
    """

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
        self.folder = folder
        self._mark = f"MESHLORA_TEST={uuid.uuid4()}"
        # Not below `folder`, whose path may be too long for a socket.
        self.temporary = Path(tempfile.mkdtemp(prefix="meshlora-test-"))
        (folder / "home").mkdir(exist_ok=True)
        name, value = self._mark.split("=")
        own = {"HOME": str(folder / "home"), "TMPDIR": str(self.temporary), name: value, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | own | variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Where the tests themselves run in the background, a shell has them ignore it, and so would this process.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number in {self.process.pid, *self.living()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.process.communicate()
        wait_until(lambda: not self.living())
        for folder in [*self.folders(), self.temporary]:
            shutil.rmtree(folder, ignore_errors=True)

    def end(self, timeout_s: float = 60.0) -> tuple[int, str, str]:
        """(exit code, stdout, stderr), once it has ended."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def maps(self) -> str:
        """The files that are mapped into it, shared libraries among them; nothing once it has ended."""
        try:
            return Path(f"/proc/{self.process.pid}/maps").read_text()
        except OSError:
            return ""

    def living(self) -> list[int]:
        """The processes that it has started, and those that they have, whoever is their parent by now."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdecimal() and self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # it has ended, or it is not ours
                continue
        return sorted(set(found) - {self.process.pid})

    def folders(self) -> list[Path]:
        """What lies in its folder for temporary files, and in memory under its number."""
        return [*self.temporary.iterdir(), *MEMORY.glob(f"meshlora-{self.process.pid}-*")]


def wait_until(ready: Callable[[], object], timeout_s: float = 90.0, pause_s: float = 0.05) -> None:
    """Return when `ready()` is true; fail when it is not in time."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(pause_s)


def is_alive(pid: int) -> bool:
    """Whether it runs: one that has ended, and nobody has asked how, has no words."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    return False


def free_port() -> int:
    """One that nothing listens on just now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@functools.cache
def own_mounts() -> tuple[str, ...]:
    """How a process gets mounts of its own here: as an ordinary user, or as root; nothing where neither may."""
    for words in (("unshare", "--user", "--map-root-user", "--mount"), ("unshare", "--mount")):
        tried = [*words, "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
        if shutil.which("unshare") and subprocess.run(tried, capture_output=True, check=False).returncode == 0:
            return words
    return ()


@functools.cache
def has_sandbox() -> bool:
    """Whether bubblewrap is there, and may make the namespaces of a sandbox."""
    words = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "true"]
    return shutil.which("bwrap") is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def answering(server: BaseServer) -> Iterator[int]:
    """`server` answers during the block, in a thread; its port."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
