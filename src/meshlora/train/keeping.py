"""Which checkpoints of a run stay on disk, and the two names that point at one of them.

Owns: `checkpoints/latest` and `checkpoints/best`, what `train.keep_last` and `train.keep_best` remove, and what a
killed save left behind. Does not own: what is in a checkpoint, and whether it is whole (`train.checkpoint`).
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from pathlib import Path

from meshlora.errors import UserError
from meshlora.state.files import fsync_folder
from meshlora.train.checkpoint import FOLDER, Checkpoint, read_checkpoint, step_folders

LATEST, BEST = "latest", "best"


class Keeping:
    """What stays of the checkpoints of the run in `output`. keep_last: how many of the newest, 0: all."""

    def __init__(self, output: Path, *, keep_last: int, keep_best: bool, resume: Checkpoint | None) -> None:
        self.folder, self.keep_last, self.keep_best = output / FOLDER, keep_last, keep_best
        self.best_loss = math.inf
        if keep_best and resume is not None:
            self.best_loss = _loss_of_best(self.folder / BEST, until=resume.step)

    def is_best(self, loss: float) -> bool:
        """Whether a checkpoint with this evaluation loss would be the best of the run so far."""
        return self.keep_best and loss < self.best_loss

    def saved(self, step: int, *, is_best: bool, loss: float | None) -> None:
        """The checkpoint of `step` is whole: let the names point at it, and only then remove what need not stay.

        Raises:
            OSError: a name could not be written. It still points at a whole checkpoint.
        """
        new = self.folder / folder_name(step)
        point(self.folder / LATEST, new.name)
        if is_best:
            assert loss is not None
            point(self.folder / BEST, new.name)
            self.best_loss = loss
        if not self.keep_last:
            return
        # Those of later steps are of a run that went on from an earlier one than its last: they are not older.
        older = [folder for number, folder in step_folders(self.folder) if number <= step]
        best = (self.folder / BEST).resolve()
        for folder in older[self.keep_last :]:
            if folder.resolve() != best:
                _remove(folder)


def folder_name(step: int) -> str:
    """`step-000050`."""
    return f"step-{step:06d}"


def point(name: Path, target: str) -> None:
    """Make `name` a symbolic link to its neighbour `target`. At any moment it names the old one or the new one."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, name)
    fsync_folder(name.parent)


def clear_leftovers(output: Path) -> None:
    """Remove what saves that were killed left in `output`: folders and files under temporary names.

    A folder that was put aside for its successor, which never came, gets its name back.
    """
    for folder in (output, output / FOLDER):
        for old in folder.glob(".*.old") if folder.is_dir() else ():
            path = folder / old.name[1:].rsplit(".", 2)[0]
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.replace(path)
        for left in folder.glob(".*.tmp") if folder.is_dir() else ():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    # Under another name first: killed half way through, it leaves no checkpoint with a part of its files.
    away = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp"))
    with contextlib.suppress(OSError):
        os.replace(folder, away / folder.name)
    shutil.rmtree(away, ignore_errors=True)


def _loss_of_best(best: Path, *, until: int) -> float:
    """Its evaluation loss; infinite where there is none, or it comes later than the run goes on from."""
    try:
        found = read_checkpoint(best)
    except UserError:
        return math.inf
    return found.eval_loss if found.step <= until and found.eval_loss is not None else math.inf
