"""Folders and files that are believed only from this user, what caches lie in; and locks between processes that need
the same thing in one: one makes it, the others wait and say for whom.

Owns: making them, telling whether somebody else can have written one, and the words where one can; what holders of
locks write into them, and how long anybody waits. Does not own: what is kept there (`data.cache`,
`common.proof_records`, `verify.proof`).

Folders are made with mode 0700 and files with 0600. What is read must belong to this user, root included, and nobody
else may be able to write it. A checksum beside the content says only that it is undamaged: whoever writes the one
writes the other. A file's owner and mode are asked of the file that was opened, so exchanging it in between gains
nothing. Folders further up are not looked at: who can rename a cache can only put files of his own in its place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import platform
import pwd
import shlex
import stat
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from meshlora.common.errors import UserError
from meshlora.common.files import write_atomically

# Who waits for a lock says so after this: one that is free soon is nobody's business.
SAY_AFTER_S = 5.0
_POLL_S = 0.1
# Of a holder's words: a command line may be of any length.
_LONGEST = 300
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

logger = logging.getLogger(__name__)


class NotOwnError(OSError):
    """Somebody else may have written what was to be read; the message is what and why."""


@dataclass(frozen=True)
class PrivateFolder:
    """A folder for what this user alone may have written.

    Attributes:
        name: what messages call it, with its path. way_out: what to do where it cannot be used.
    """

    path: Path
    name: str
    way_out: str

    def make(self) -> None:
        """Make it, and what is missing above it; of one that exists see that nobody else can write it.

            PrivateFolder(Path("tokens"), "cache_dir=tokens", "choose another folder").make()

        It may be a symbolic link: what counts is the folder that it leads to.

        Raises:
            UserError: it cannot be made, or others can write it.
        """
        with self.usable():
            missing = [folder for folder in self.path.parents if not folder.exists()]
            for folder in (*reversed(missing), self.path):
                folder.mkdir(mode=0o700, exist_ok=True)
            found = self.path.stat()
        if fault := _fault(found):
            can_mend = found.st_uid == os.geteuid()
            mend = f"chmod go-w {shlex.quote(str(self.path))}" if can_mend else "move it away"
            raise UserError(self.name, f"{fault}, so nothing in it is believed", f"{mend}, or {self.way_out}")

    @contextlib.contextmanager
    def usable(self) -> Iterator[None]:
        """Work in it.

        Raises:
            UserError: the block raised OSError.
        """
        try:
            yield
        except OSError as error:
            raise UserError(self.name, f"it cannot be written ({error.strerror or error})", self.way_out) from error


def open_own(path: Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a file for reading that nobody but this user can have written; flags: of `os.open`, for more than that.

    Raises:
        NotOwnError: somebody else can have written it or its folder. OSError: it cannot be opened, or is no file.
    """
    _refuse(path.parent, path.parent.stat())
    try:
        # Neither through a link, nor waiting for the other end of a pipe.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOwnError(f"{path}: it is a symbolic link") from None
        raise
    try:
        _refuse(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def write_own(path: Path, content: bytes) -> None:
    """Write a file that this user alone may read and write, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    # A name of its own although writers hold a lock: on some network file systems locks do not hold.
    write_atomically(path, lambda temporary: temporary.write_bytes(content), mode=0o600)


def check_tree(folder: Path) -> None:
    """See that nobody but this user can have written `folder` or anything in it.

    Only inside a `PrivateFolder`, where nobody else can change it afterwards.

    Raises:
        NotOwnError: somebody else can have. FileNotFoundError: it is missing.
    """
    for path in (folder, *folder.rglob("*")):
        _refuse(path, path.lstat())


def close_tree(folder: Path) -> None:
    """Take `folder` and what lies in it from everybody else: libraries write with whatever mode the umask leaves."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)


def _refuse(path: Path, found: os.stat_result) -> None:
    if fault := _fault(found):
        raise NotOwnError(f"{path}: {fault}")


def _fault(found: os.stat_result) -> str:
    """Why a file or folder may be somebody else's work; empty where it cannot be."""
    if stat.S_ISLNK(found.st_mode):
        return "it is a symbolic link"
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return "it is neither a file nor a folder"
    if found.st_uid != os.geteuid():
        return f"it belongs to {_user(found.st_uid)}"
    if found.st_mode & _WRITABLE_BY_OTHERS:
        return f"others can write it (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:  # containers often have no list of users
        return f"uid {uid}"


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
