"""One run at a time in an output folder, on one machine and on a shared file system.

Owns: the lock of a folder, its holder, when a left one is stale. Does not own: when a run takes it (`run.together`).

The lock is `flock` on a separate file: the kernel releases it when the last process with the open file ends, however it
ends, so on one machine no lock is stale. Other machines may not see it (NFS without locks, Lustre with localflock): for
them the holder touches the file every few seconds. Another machine's lock is stale once its file was watched for a
minute and did not change; clocks are not compared, as those of machines differ.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshlora_ground.errors import UserError

FILE = ".lock"
_BEAT_S = 5.0
# Another machine's lock is stale after so long without a beat.
_STALE_S = 60.0
# Two that find the same lock stale both write their names; the later one wins, and the other sees it by then.
_SETTLE_S = 2.0
# `holder_of` holds the lock for a moment.
_TRIES, _BETWEEN_TRIES_S = 3, 0.1
_LARGEST, _LONGEST_NAME = 1024, 255
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_OPENED = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Holder:
    """The present or past holder of a lock. since: seconds, by its own clock. boot: id of its kernel's boot."""

    pid: int
    host: str
    since: int
    boot: str

    def __str__(self) -> str:
        """For messages: `process 123 on host h since 2025-01-31 12:00:00`."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on host {self.host} since {since}"


@contextlib.contextmanager
def hold(output: Path, *, say: Callable[[str], None] = print) -> Iterator[int]:
    """Hold the lock of `output` inside the block; yields its open file.

    A child process that inherits the file (`pass_fds`) holds it too, should this one be killed. The folder is created
    if missing, and removed again if it stays empty. say: called with a message before a wait.

    Raises:
        UserError: another run trains there; or the folder cannot be written.
    """
    made: list[Path] = []
    stop, beats = threading.Event(), None
    file = output / FILE
    try:
        try:
            for folder in reversed([each for each in (output, *output.parents) if not each.is_dir()]):
                with contextlib.suppress(FileExistsError):  # another run has just made it
                    folder.mkdir()
                    made.append(folder)
            descriptor = _take(file, say)
        except OSError as error:
            way_out = "free some space" if error.errno == errno.ENOSPC else "choose another folder"
            raise UserError(f"train.output={output}", f"it cannot be locked ({error.strerror})", way_out) from None
        try:
            beats = threading.Thread(target=_beat, args=(descriptor, stop), daemon=True, name="lock")
            beats.start()
            yield descriptor
        finally:
            stop.set()
            if beats is not None:
                beats.join()
            with contextlib.suppress(OSError):  # the folder may be gone
                if _is_same(file, descriptor):
                    file.unlink()
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a child that has the file open still
            os.close(descriptor)
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # something is in it
                folder.rmdir()


def holder_of(output: Path) -> Holder | None:
    """The holder of the lock of `output`, as far as can be told without waiting; None if it is free.

    A holder on another machine may be gone already.
    """
    try:
        with _opened(output / FILE) as descriptor:
            holder = _read(descriptor)
            is_free = _lock(descriptor, fcntl.LOCK_SH)
    except OSError:
        return None
    return None if is_free and holder is not None and holder.boot == _boot() else holder


def _take(file: Path, say: Callable[[str], None]) -> int:
    """Take the lock: its open file. Raises: UserError: another run holds it. OSError: the file system refuses."""
    while True:
        is_new = True
        try:
            descriptor = os.open(file, os.O_RDWR | _OPENED | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            is_new = False
            try:
                descriptor = os.open(file, os.O_RDWR | _OPENED)
            except FileNotFoundError:
                continue  # released in between
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UserError(f"train.output={file.parent}", f"{FILE} in it is no file of ours", "remove it")
            if not _lock(descriptor, fcntl.LOCK_EX):
                raise _refusal(file, _read(descriptor))
            if not _is_same(file, descriptor):
                os.close(descriptor)
                continue  # released, and the file removed
            before = _read(descriptor)
            is_of_others = not is_new and (before is None or before.boot != _boot())
            if is_of_others:
                _watch(file, before, say)
                if not _is_same(file, descriptor):
                    os.close(descriptor)
                    continue  # released meanwhile
            own = _write(descriptor)
            if is_of_others:
                time.sleep(_SETTLE_S)
                if (now := _state(file)) is None or now[-1] != own:
                    raise _refusal(file, now and now[-1])
            return descriptor
        except BaseException:
            if is_new and _is_same(file, descriptor):  # as on a full disk
                file.unlink()
            os.close(descriptor)
            raise


def _watch(file: Path, before: Holder | None, say: Callable[[str], None]) -> None:
    """Wait until another machine's lock is stale. Raises: UserError: the file changes: its holder is alive."""
    say(
        f"train.output={file.parent}: {_words(before)} trained there; watching for {_STALE_S:g} s whether it still does"
    )
    first, until = _state(file), time.monotonic() + _STALE_S
    while time.monotonic() < until:
        time.sleep(min(1.0, _STALE_S / 10))
        if (now := _state(file)) != first:
            if now is None:
                return
            raise _refusal(file, now[-1])


def _state(file: Path) -> tuple[int, int, Holder | None] | None:
    """(inode, modification time, holder by its content) of the file; None if it is gone."""
    try:
        with _opened(file) as descriptor:
            found = os.fstat(descriptor)
            return found.st_ino, found.st_mtime_ns, _read(descriptor)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    """Reopen the file each time: only then does a network file system ask its server."""
    descriptor = os.open(file, os.O_RDONLY | _OPENED)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Whether the lock was taken; True also if the file system has no locks."""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_BETWEEN_TRIES_S)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                raise
        return True
    return False


def _is_same(file: Path, descriptor: int) -> bool:
    try:
        found = os.stat(file, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def _beat(descriptor: int, stop: threading.Event) -> None:
    while not stop.wait(_BEAT_S):
        with contextlib.suppress(OSError):  # the server may be away for a while
            os.utime(descriptor)  # the change of time is what another machine sees


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _write(descriptor: int) -> Holder:
    host = re.sub(r"[^\w.:-]", "-", socket.gethostname(), flags=re.ASCII)[:_LONGEST_NAME]
    holder = Holder(os.getpid(), host, int(time.time()), _boot())
    os.ftruncate(descriptor, 0)  # what is there may be longer
    os.pwrite(descriptor, json.dumps(vars(holder)).encode(), 0)
    os.fsync(descriptor)
    return holder


def _read(descriptor: int) -> Holder | None:
    """The holder by the file's content; None if there is none or it is malformed."""
    try:
        content = json.loads(os.pread(descriptor, _LARGEST, 0))
        holder = Holder(**content)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    numbers, names = (holder.pid, holder.since), (holder.host, holder.boot)
    is_right = all(type(number) is int and 0 <= number < 2**32 for number in numbers) and all(
        isinstance(name, str) and len(name) <= _LONGEST_NAME and re.fullmatch(r"[\w.:-]*", name, re.ASCII)
        for name in names
    )
    return holder if is_right else None


def _refusal(file: Path, holder: Holder | None) -> UserError:
    rule = f"another run trains there: {_words(holder)}"
    return UserError(f"train.output={file.parent}", rule, "wait for it, end it, or choose another output")


def _words(holder: Holder | None) -> str:
    return str(holder or "a process that has not said its name")
