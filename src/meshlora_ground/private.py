"""Cache folders and files that only this user can have written, and locks between the processes that share them.

Owns: that interpreters which libraries start run no file of the working folder, too. Does not own: the content of
caches (`reading.cache`, `meshlora_ground.proof_records`, `verify.proof`).

Folders are created with mode 0700 and files with 0600. Anything read must belong to this user, even if that is root,
and must not be writable by anybody else. A checksum next to the content shows only that it is undamaged: whoever can
write one can write the other. Owner and mode are checked on the open file descriptor, so swapping the file in between
gains nothing. Parent folders are not checked: whoever can rename a cache can only replace it by files of their own.
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

from meshlora_ground.errors import UserError
from meshlora_ground.files import write_atomically

# Of all that is worked out once: proofs, tokens, hashes. An image or a shared folder may bring it along.
CACHE = Path(os.environ.get("MESHLORA_CACHE") or "~/.cache/meshlora")
# Waiting for a lock is reported after this time: short waits are not worth a line.
SAY_AFTER_S = 5.0
_POLL_S = 0.1
# Characters of a lock file: a command line may be of any length.
_LONGEST = 300
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

logger = logging.getLogger(__name__)


class NotOwnError(OSError):
    """Somebody else may have written the file; the message says which file and why."""


@contextlib.contextmanager
def no_code_of_working_folder() -> Iterator[None]:
    """Interpreters that others start in the block, as multiprocessing does, do not look there for modules."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


@dataclass(frozen=True)
class PrivateFolder:
    """A folder that only this user may write.

    Attributes:
        name: its name in messages, with its path. way_out: what to do if it cannot be used.
    """

    path: Path
    name: str
    way_out: str

    def make(self) -> None:
        """Create it with its missing parents, or check that nobody else can write an existing one.

            PrivateFolder(Path("tokens"), "cache_dir=tokens", "choose another folder").make()

        It may be a symbolic link: the folder it points to is checked.

        Raises:
            UserError: it cannot be created, or others can write it.
        """
        with self.usable():
            missing = [folder for folder in self.path.parents if not folder.exists()]
            for folder in (*reversed(missing), self.path):
                folder.mkdir(mode=0o700, exist_ok=True)
            found = self.path.stat()
        if why := _why_untrusted(found):
            can_mend = found.st_uid == os.geteuid()
            mend = f"chmod go-w {shlex.quote(str(self.path))}" if can_mend else "move it away"
            raise UserError(self.name, f"{why}, so nothing in it is believed", f"{mend}, or {self.way_out}")

    @contextlib.contextmanager
    def usable(self) -> Iterator[None]:
        """Turn an OSError of the block into a UserError that names the folder."""
        try:
            yield
        except OSError as error:
            raise UserError(self.name, f"it cannot be written ({error.strerror or error})", self.way_out) from error

    def write(self, name: str, content: bytes) -> None:
        """Atomically write file `name`, which only this user may read and write. Raises: UserError."""
        self.make()
        with self.usable():
            # Atomic although writers hold a lock: on some network file systems locks do not work.
            write_atomically(self.path / name, lambda temporary: temporary.write_bytes(content), mode=0o600)


def open_own(path: Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open for reading a file that only this user can have written. flags: of `os.open`, if more than reading. Raises:
    NotOwnError: somebody else could have written it or its folder. OSError: it cannot be opened, or is not a file."""
    _refuse(path.parent, path.parent.stat())
    try:
        # Neither follow a link nor block on a pipe.
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


def check_tree(folder: Path) -> None:
    """Check that only this user can have written `folder` and everything in it.

    For use inside a `PrivateFolder`, where nobody else can change it afterwards.

    Raises:
        NotOwnError: somebody else could have. FileNotFoundError: it is missing.
    """
    for path in (folder, *folder.rglob("*")):
        _refuse(path, path.lstat())


def close_tree(folder: Path) -> None:
    """Remove everybody else's access to `folder` and its content: libraries write with the mode the umask leaves."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)


def _refuse(path: Path, found: os.stat_result) -> None:
    if why := _why_untrusted(found):
        raise NotOwnError(f"{path}: {why}")


def _why_untrusted(found: os.stat_result) -> str:
    """Why somebody else may have written a file or folder; empty if nobody can have."""
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
    """Hold the lock file `name` of `folder` for the block. The file is kept: removing it would let two hold it.

        with locked(folder, "tokens.lock", "makes the same tokens", limit_s=3600.0):
            ...

    Args:
        doing: what the holder does, for messages of those who wait.
        limit_s: the longest wait; longer than any working holder may take.

    Raises:
        UserError: the file cannot be created or may be somebody else's; no locks on the file system; `limit_s` is over.
    """
    with folder.usable():
        stream = open_own(folder.path / name, os.O_RDWR | os.O_CREAT)
    with stream:
        _wait(stream.fileno(), folder, name, doing, limit_s)
        _write_holder(stream.fileno())
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
            rule = f"{_holder(descriptor)}, which {doing}, holds {name} longer than {limit_s:.0f} s"
            raise UserError(folder.name, rule, f"end that process, or {folder.way_out}")
        if waited_s >= SAY_AFTER_S and not has_said:
            logger.warning("waiting for %s, which %s (%s)", _holder(descriptor), doing, folder.path / name)
            has_said = True
        time.sleep(_POLL_S)


def _write_holder(descriptor: int) -> None:
    """Write the holder's description into the lock file."""
    words = f"process {os.getpid()} on {platform.node()} ({shlex.join(sys.orig_argv)})"
    words = textwrap.shorten(words, _LONGEST, placeholder=" …")
    # Only informative: a full disk is reported where data is stored.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, words.encode(errors="replace"), 0)


def _holder(descriptor: int) -> str:
    """The description in the lock file, which anybody with access may have written."""
    words = os.pread(descriptor, 4 * _LONGEST, 0).decode(errors="replace")
    return "".join(filter(str.isprintable, words))[:_LONGEST] or "another process"
