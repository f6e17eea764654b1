"""Running a command of a stranger's without a sandbox. A program of its own: it imports nothing of meshlora.

    python -I contained.py FOLDER COMMAND...

runs COMMAND in FOLDER and ends as it does, or where it gets SIGTERM. The network is cut and processes are limited where
the kernel allows that to a user, and what was started is killed at the end. It is no jail: the code runs as this user,
may read, write and kill what the user may, and this program, too.

Owns: the end of everything that was started. Does not own: a sandbox (`rl.sandbox`), limits (`rl.apart`).
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
_NOBODY, _MOST_PROCESSES = 65534, 16
_ENDS = {signal.SIGCHLD, signal.SIGTERM}
_LOOK_S = 0.005


def main(words: list[str]) -> int:
    """Run, and end all that was started."""
    folder, *command = words
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what loses its parent becomes a child of this process
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    child = os.fork()
    if child == 0:
        try:
            _become(folder, command, libc)
        finally:
            os._exit(126)
    status = None
    while status is None and signal.sigwait(_ENDS) == signal.SIGCHLD:
        ended, found = os.waitpid(child, os.WNOHANG)
        if ended:
            status = found
    _end_all(child, is_gone=status is not None)
    if status is None or os.WIFSIGNALED(status):
        return 128 + (signal.SIGKILL if status is None else os.WTERMSIG(status))
    return os.WEXITSTATUS(status)


def _become(folder: str, command: list[str], libc: ctypes.CDLL) -> None:
    """Turn this process into the stranger's."""
    os.setsid()
    os.chdir(folder)
    if os.geteuid() == 0 and all(map(_is_open, (sys.executable, sys.base_prefix, __file__))):
        os.chown(folder, _NOBODY, _NOBODY)
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)  # no limit of processes holds for root
    # Its own user namespace makes the limit of processes its own, too, and gives the right to leave the network.
    if libc.unshare(_NEW_USER | _NEW_NETWORK) == 0:
        resource.setrlimit(resource.RLIMIT_NPROC, (_MOST_PROCESSES, _MOST_PROCESSES))
    libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # last: another user would lose it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
    os.execve(command[0], command, environment)


def _is_open(path: str) -> bool:
    """Whether any user may come to `path`."""
    real = os.path.realpath(path)
    parts = [os.path.dirname(real)]
    while (above := os.path.dirname(parts[-1])) != parts[-1]:
        parts.append(above)
    return all(os.stat(part).st_mode & stat.S_IXOTH for part in parts)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
