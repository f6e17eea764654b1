"""Locks between processes that need the same thing: one makes it, the others wait and say for whom.

Owns: the lock files, what their holders write into them, and how long anybody waits. Does not own: what is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import shlex
import sys
import textwrap
import time
from collections.abc import Iterator

from meshlora.common.errors import UserError
from meshlora.common.private import PrivateFolder, open_own

# Who waits says so after this: a lock that is free soon is nobody's business.
SAY_AFTER_S = 5.0
_POLL_S = 0.1
# Of a holder's words: a command line may be of any length.
_LONGEST = 300

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(folder: PrivateFolder, name: str, doing: str, *, limit_s: float) -> Iterator[None]:
    """Hold the lock file `name` of `folder` while the block runs. The file stays: two could hold one that is removed.

        with locked(folder, "tokens.lock", "makes the same tokens", limit_s=3600.0):
            ...

    Args:
        doing: what its holder does, for the words of those who wait.
        limit_s: how long to wait for it at most; longer than any holder that works may take.

    Raises:
        UserError: the file cannot be made or may be somebody else's; its file system has no locks; `limit_s` is over.
    """
    with folder.usable():
        stream = open_own(folder.path / name, os.O_RDWR | os.O_CREAT)
    with stream:
        _wait(stream.fileno(), folder, name, doing, limit_s)
        _sign(stream.fileno())
        yield


def _wait(descriptor: int, folder: PrivateFolder, name: str, doing: str, limit_s: float) -> None:
    begun, has_said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited_s = time.monotonic() - begun
        except OSError as error:  # some network file systems
            raise UserError(folder.name, f"its file system has no locks ({error.strerror})", folder.way_out) from None
        if waited_s >= limit_s:
            raise UserError(
                folder.name,
                f"{_holder(descriptor)}, which {doing}, holds {name} longer than {limit_s:.0f} s",
                f"end that process, or {folder.way_out}",
            )
        if waited_s >= SAY_AFTER_S and not has_said:
            logger.warning("waiting for %s, which %s (%s)", _holder(descriptor), doing, folder.path / name)
            has_said = True
        time.sleep(_POLL_S)


def _sign(descriptor: int) -> None:
    """Write into the lock who holds it."""
    words = f"process {os.getpid()} on {platform.node()} ({shlex.join(sys.orig_argv)})"
    words = textwrap.shorten(words, _LONGEST, placeholder=" …")
    # Words for others only: a full disk is said where something is stored.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, words.encode(errors="replace"), 0)


def _holder(descriptor: int) -> str:
    """Who says that he holds the lock."""
    words = os.pread(descriptor, 4 * _LONGEST, 0).decode(errors="replace")
    return "".join(filter(str.isprintable, words))[:_LONGEST] or "another process"
