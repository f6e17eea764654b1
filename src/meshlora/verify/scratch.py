"""Scratch folders for the short-lived files of a proof: in memory if they fit.

Owns: their location and removal. A proof writes its files with fsync, as a run does: on a busy disk a small proof would
wait for other writers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

_MEMORY = Path("/dev/shm")
# Larger runs go to disk: fsync does not dominate their time, and memory is scarce.
_MOST_BYTES = 2**30
# A run may take one part in so many of the free memory: others use it too.
_PART = 4
_REMOVE_S = 5.0


def new_scratch() -> list[Path]:
    """New folders of this process: one in memory, if that is writable, then one on disk.

    Raises:
        OSError: the folder for temporary files is not writable.
    """
    # Names the owner, for whoever cleans up after a crash of the machine.
    prefix = f"meshlora-{os.getpid()}-"
    folders: list[Path] = []
    with contextlib.suppress(OSError):
        folders.append(Path(tempfile.mkdtemp(prefix=prefix, dir=_MEMORY)))
    try:
        folders.append(Path(tempfile.mkdtemp(prefix=prefix)))
    except OSError:
        remove(folders)
        raise
    return folders


def with_room(folders: list[Path], num_bytes: int) -> Path:
    """The first of `folders` with room for `num_bytes`; by default the last, which is on disk."""
    for folder in folders[:-1]:
        if num_bytes <= min(_MOST_BYTES, shutil.disk_usage(folder).free // _PART):
            return folder
    return folders[-1]


def remove(folders: Iterable[Path]) -> None:
    """Remove `folders`, even while a dying process still writes to them."""
    deadline = time.monotonic() + _REMOVE_S
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
            shutil.rmtree(folder, ignore_errors=True)
