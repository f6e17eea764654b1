"""The sandbox of a stranger's code: bubblewrap's namespaces, and in them what Python needs and nothing else.

    with contextlib.ExitStack() as stack:
        subprocess.Popen([*sandbox("bubblewrap", stack), PYTHON, "-I", "-S", str(PROGRAM), ...]).wait()

In it there are no other processes, no network, Python's files to be read, no others, and `/tmp` in memory. Code in it
has no rights, and can make no namespaces of its own. Where this process ends, or the command, all in it does.

Owns: what is visible in it, as whom its code runs, why it cannot be had here. Does not own: limits of a process
(`rl.apart`), what is run (`rl.unit_tests`), the way without it (`rl.contained`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshlora_ground.errors import UserError

PYTHON = os.path.realpath(sys.executable)
PROGRAM = Path(__file__).with_name("apart.py")
PACKAGES = site.getsitepackages()
MOST_PROCESSES = 16
_CONTAINED = Path(__file__).with_name("contained.py")
_MOST_BYTES = 64 * 2**20  # of /tmp, which is memory
_NOBODY = "65534"
_OLDEST = (0, 8)  # which can forbid namespaces of the sandbox's own
_BASE = Path(sys.base_prefix).resolve()
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/alternatives")
_MORE = ("/usr/share/zoneinfo", "/nix/store", "/gnu/store")


def sandbox(kind: str, stack: contextlib.ExitStack) -> list[str]:
    """The words before those of a command that is to run in a sandbox. kind: of `UnitTestsReward.sandbox`.

    stack: at its end the folder goes that a command without a sandbox runs in.

    Raises:
        UserError: there is no bubblewrap.
    """
    if kind == "none":
        made = tempfile.TemporaryDirectory(prefix="meshlora-tests-", ignore_cleanup_errors=True)
        folder = stack.enter_context(made)
        return [sys.executable, "-P", "-I", str(_CONTAINED), folder]
    program = bubblewrap()
    inner = [program, *_INNER, *_visible(_python_paths()), *_OWN, "--"]
    # As root there is a second sandbox around it, where nobody may come to this Python, wherever it is.
    return [*as_nobody(program), *inner] if os.geteuid() == 0 else inner


@functools.cache
def bubblewrap() -> str:
    """Where it is. Raises: UserError: it is not, or too old."""
    found = shutil.which("bwrap")
    oldest = ".".join(map(str, _OLDEST))
    if found is None:
        raise UserError("bubblewrap", "it is not installed: there is no bwrap", WAY_OUT)
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    version = tuple(map(int, re.findall(r"\d+", said)[:2]))
    if version < _OLDEST:
        raise UserError("bubblewrap", f"{said.strip() or 'it'} is older than {oldest}", WAY_OUT)
    return found


WAY_OUT = (
    "install bubblewrap 0.8 or later (apt-get install bubblewrap) where user namespaces are allowed, or read in "
    "docs/rl.md what sandbox: none does not keep the code from"
)
_INNER = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
    *("--hostname", "sandbox", "--clearenv"),
    *("--setenv", "HOME", "/tmp", "--setenv", "TMPDIR", "/tmp"),
    *("--setenv", "LANG", "C.UTF-8", "--setenv", "OMP_NUM_THREADS", "1"),
)
_OWN = (
    *("--dev-bind", "/dev/null", "/dev/null"),
    *("--dev-bind", "/dev/zero", "/dev/zero"),
    *("--dev-bind", "/dev/urandom", "/dev/urandom"),
    *("--size", str(_MOST_BYTES), "--tmpfs", "/tmp"),
    *("--symlink", "/tmp", "/dev/shm"),  # where semaphores are, in the same memory
    *("--remount-ro", "/"),
    *("--chdir", "/tmp"),
)


@functools.cache
def _python_paths() -> tuple[str, ...]:
    """What an interpreter reads: itself, its library, packages, and the libraries of the system."""
    given = [*_SYSTEM, *_MORE, str(_BASE / "lib"), str(_BASE / "lib64"), PYTHON, *PACKAGES, str(PROGRAM)]
    paths = sorted({Path(each) for each in given if os.path.exists(each)})
    return tuple(str(path) for path in paths if not any(other in path.parents for other in paths))


def _visible(paths: Sequence[str]) -> list[str]:
    """Words that make `paths` visible, to be read."""
    folders = sorted({str(above) for path in paths for above in Path(path).parents} - {"/"})
    made = [word for folder in folders for word in ("--perms", "0755", "--dir", folder)]
    return made + [word for path in paths for word in ("--ro-bind", path, path)]


def as_nobody(program: str, more: Sequence[str] = ()) -> list[str]:
    """Words that run a command as nobody, who sees what Python needs, and may start `program`. more: paths to see."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise UserError("setpriv", "meshlora runs as root, and there is none to become nobody", "install util-linux")
    words = [program, "--unshare-pid", "--die-with-parent", *_visible([*_python_paths(), program, setpriv, *more])]
    words += ["--perms", "1777", "--dir", "/tmp", "--dev-bind", "/dev", "/dev", "--proc", "/proc"]
    words += ["--bind", "/proc/sys/user", "/proc/sys/user", "--"]
    return [*words, setpriv, "--pdeathsig", "KILL", "--reuid", _NOBODY, "--regid", _NOBODY, "--clear-groups"]
