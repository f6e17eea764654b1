"""Running a Python file of a stranger's within limits. A program of its own: it imports nothing of meshlora.

    python -I contained.py FOLDER CPU_SECONDS WALL_SECONDS MEMORY_BYTES

runs `FOLDER/main.py` there, and prints in one line how it ended, `passed` or a reason. Processor time, memory, file
sizes and wall time are limited, the network is cut where the kernel allows that to a user, and nothing that it started
is left. It is no jail: the code runs as this user, and may read and write what the user may.

Owns: limits, and the end of everything that was started. Does not own: what is run (`rl.unit_tests`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Callable

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_LARGEST_FILE = 16 * 2**20
_NOBODY = 65534
_MOST_FILES, _MOST_PROCESSES = 64, 64
_LOOK_S = 0.005


def main(words: list[str]) -> int:
    """Run, end all that was started, and say how it went."""
    folder, cpu_s, wall_s, memory = words[0], int(words[1]), float(words[2]), int(words[3])
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None:
        libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what loses its parent becomes a child of this process
    child = os.fork()
    if child == 0:
        try:
            _become(folder, cpu_s, memory, libc)
        finally:
            os._exit(126)
    deadline, status = time.monotonic() + wall_s, None
    while time.monotonic() < deadline:
        ended, found = os.waitpid(child, os.WNOHANG)
        if ended:
            status = found
            break
        time.sleep(_LOOK_S)
    _end_all(child, is_gone=status is not None)
    os.write(1, _words(status, cpu_s, wall_s).encode())
    return 0


def _become(folder: str, cpu_s: int, memory: int, libc: ctypes.CDLL | None) -> None:
    """Turn this process into the stranger's, within limits."""
    os.setsid()
    os.chdir(folder)
    if os.geteuid() == 0 and all(_is_open(path) for path in (sys.executable, sys.prefix, sys.base_prefix)):
        os.chown(folder, _NOBODY, _NOBODY)
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)  # no limit of processes holds for root
    # Its own user namespace makes the limit of processes its own, too, and gives the right to leave the network.
    if libc is not None and libc.unshare(_NEW_USER | _NEW_NETWORK) == 0:
        _limit(resource.RLIMIT_NPROC, _MOST_PROCESSES)
    _limit(resource.RLIMIT_CPU, cpu_s, more=1)
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_FSIZE, _LARGEST_FILE)
    _limit(resource.RLIMIT_NOFILE, _MOST_FILES)
    _limit(resource.RLIMIT_CORE, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.closerange(3, 1024)
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, "-P", "-I", "main.py"], environment)


def _is_open(path: str) -> bool:
    """Whether any user may come to `path`."""
    real = os.path.realpath(path)
    parts = [real]
    while (above := os.path.dirname(parts[-1])) != parts[-1]:
        parts.append(above)
    return all(os.stat(part).st_mode & stat.S_IXOTH for part in parts)


def _limit(which: int, most: int, *, more: int = 0) -> None:
    """more: beyond the limit that is told, the one that ends."""
    _, hard = resource.getrlimit(which)
    told, ends = (each if hard == resource.RLIM_INFINITY else min(each, hard) for each in (most, most + more))
    resource.setrlimit(which, (told, ends))


def _end_all(child: int, *, is_gone: bool) -> None:
    """Kill the child, its group, and what has left the group: all of it is, or becomes, a child of this process."""
    _kill(child, os.killpg)  # at once: a group cannot grow meanwhile
    if not is_gone:
        os.waitpid(child, 0)
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            for other in _children():
                _kill(other, os.killpg)
                _kill(other, os.kill)
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            time.sleep(_LOOK_S)


def _kill(number: int, how: Callable[[int, int], None]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(number, signal.SIGKILL)


def _children() -> list[int]:
    found = []
    own = str(os.getpid())
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                if file.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(name))
    return found


def _words(status: int | None, cpu_s: int, wall_s: float) -> str:
    """How it ended."""
    if status is None:
        return f"took longer than {wall_s:g} s"
    if os.WIFEXITED(status):
        code = os.WEXITSTATUS(status)
        return "passed" if code == 0 else f"ended with {code}"
    number = os.WTERMSIG(status)
    return f"used more than {cpu_s} s of a processor" if number == signal.SIGXCPU else f"was ended by signal {number}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
