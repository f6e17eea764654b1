"""SHA-256 of large files that rarely change, cached so that each content is read once per machine.

The cache key is device, inode, size, mtime and ctime in ns. A `touch` costs one more read and nothing else. A program
can reset mtime but not ctime, so replaced content is noticed; a change behind the file system's back, as by writing to
its disk, is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

from meshlora_ground import private
from meshlora_ground.errors import MeshloraError, UserError
from meshlora_ground.private import PrivateFolder, open_own

CACHE = private.CACHE / "hashes"
# Smaller files take milliseconds and are read every time.
_SMALLEST_KEPT = 4 << 20
# A file changed this recently may change again within one tick of its file system's clock.
_SETTLED_S = 2.0
_CHUNK = 4 << 20
_LARGEST_ENTRY = 1024
_MOST_THREADS = 8


class FileHashes:
    """The SHA-256 of `files`, computed in threads from construction until the block ends.

    with FileHashes(files) as hashes:
        ...  # load the same files
        hashes[file]  # waits for it
    """

    def __init__(self, files: Iterable[Path], *, cache: Path = CACHE) -> None:
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "sha256")
        self._found: dict[Path, Future[str]] = {}
        for file in dict.fromkeys(files):
            self._found[file] = self._threads.submit(_hash, file, cache, self._stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def are_there(self, timeout_s: float) -> bool:
        """Whether all hashes are ready, after waiting at most `timeout_s`."""
        return not wait(self._found.values(), timeout=timeout_s).not_done

    def __getitem__(self, file: Path) -> str:
        """The hash of `file` in hexadecimal, waited for. Raises: UserError: it cannot be read, or changed meanwhile."""
        return self._found[file].result()


def sha256_of(file: Path) -> str:
    """The SHA-256 of the current bytes of `file`, uncached."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _hash(file: Path, cache: Path, stop: threading.Event) -> str:
    try:
        # Not blocking: opening a named pipe without a writer would never return.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as stream:
            before, begun = os.fstat(stream.fileno()), time.time()
            if not stat.S_ISREG(before.st_mode):
                raise UserError(f"{file}", "it is not a regular file")
            is_kept = before.st_size >= _SMALLEST_KEPT
            if is_kept and (known := _known(cache, before)) is not None:
                return known
            digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
            while (size := stream.readinto(chunk)) and not stop.is_set():
                digest.update(chunk[:size])
            if stop.is_set():
                raise MeshloraError(f"{file}: no longer needed")  # nobody waits for it any more
            if not _entry(before) == _entry(os.fstat(stream.fileno())) == _entry(os.stat(file)):
                raise UserError(f"{file}", "it was changed while it was read", "start again once it is whole")
    except OSError as error:
        raise UserError(f"{file}", f"it cannot be read ({error.strerror or error})") from None
    if is_kept and begun - max(before.st_mtime, before.st_ctime) > _SETTLED_S:
        _remember(cache, before, digest.hexdigest())
    return digest.hexdigest()


def _entry(found: os.stat_result) -> list[int]:
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _name(found: os.stat_result) -> str:
    return f"{found.st_dev}-{found.st_ino}.json"


def _known(cache: Path, found: os.stat_result) -> str | None:
    """The cached hash of a file; None if there is none, or if someone else may have written it."""
    with contextlib.suppress(OSError, ValueError, RuntimeError, RecursionError):
        with open_own(cache.expanduser() / _name(found)) as stream:
            content = json.loads(stream.read(_LARGEST_ENTRY))
        if isinstance(content, dict) and content.get("file") == _entry(found):
            known = content.get("sha256")
            return known if isinstance(known, str) and re.fullmatch("[0-9a-f]{64}", known) else None
    return None


def _remember(cache: Path, found: os.stat_result, sha256: str) -> None:
    with contextlib.suppress(OSError, RuntimeError, UserError):  # without a cache entry the file is only read again
        folder = cache.expanduser()
        content = json.dumps({"file": _entry(found), "sha256": sha256}).encode()
        PrivateFolder(folder, f"{folder}", "").write(_name(found), content)
