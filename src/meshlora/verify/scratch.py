"""Folders for what a proof writes and reads again within the second: in memory, where the machine has room there.

Owns: where such folders are, and their removal. The files of a proof are written with fsync, as those of a run: where
others write to the same disk, a small proof waits for them.
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
# Larger runs go to the disk: there it is not the fsync that takes the time, and memory is what they are short of.
_MOST_BYTES = 2**30
# Of the room in memory a run may take this part: others use it too.
_PART = 4
_REMOVE_S = 5.0


def new_scratch() -> list[Path]:
    """New folders of this process, the one in memory first; there is none where memory cannot be written.

    Raises:
        OSError: the folder for temporary files cannot be written.
    """
    # Whose they are: after a crash of the machine somebody has to know.
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
    """The first of `folders` that has room for `num_bytes`; the last, which is on the disk, where none is sure to."""
    for folder in folders[:-1]:
        if num_bytes <= min(_MOST_BYTES, shutil.disk_usage(folder).free // _PART):
            return folder
    return folders[-1]


def remove(folders: Iterable[Path]) -> None:
    """Remove `folders`, also while another process that is about to end still writes into them."""
    deadline = time.monotonic() + _REMOVE_S
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
            shutil.rmtree(folder, ignore_errors=True)
