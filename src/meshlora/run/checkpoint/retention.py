"""Which checkpoints of a run are kept, and the links to the latest and the best.

Owns: `checkpoints/latest` and `checkpoints/best`, removal under `train.keep_last` and `train.keep_best`, clean-up after
a killed save, and moving later checkpoints aside when a run resumes from an earlier one. Does not own: the content of
a checkpoint (`run.checkpoint.state`), and whether it is whole (`run.checkpoint.manifest`).
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshlora.run.checkpoint.manifest import NotWholeError, Saved, read_whole
from meshlora.run.checkpoint.resuming import FINISHED, FOLDER, step_folders
from meshlora.run.config.endings import EarlyStopping
from meshlora_ground.files import fsync

LATEST, BEST = "latest", "best"
# Prefix of folders for checkpoints of later steps, `set-aside-1`; results of a finished run.
ASIDE, MERGED = "set-aside", "merged"
ENDS = (FINISHED, MERGED)


class Keeping:
    """Retention of the checkpoints of the run in `output`.

    keep_last: number of newest to keep, 0: all. watched: what the best is by. values: of it, by step, in evaluations of
    the run before it was resumed; of the loss the manifests say them.
    """

    def __init__(
        self,
        output: Path,
        *,
        keep_last: int,
        keep_best: bool,
        resume: Saved | None,
        watched: EarlyStopping,
        values: Mapping[int, float],
    ) -> None:
        self.folder, self.keep_last, self.keep_best = output / FOLDER, keep_last, keep_best
        self.watched, self.best = watched, watched.worst
        if keep_best and resume is not None:
            with contextlib.suppress(NotWholeError):
                best = read_whole(self.folder / BEST)
                value = values.get(best.step) if watched.is_of_answers else best.eval_loss
                if best.step <= resume.step and value is not None and math.isfinite(value):
                    self.best = value

    def is_best(self, value: float) -> bool:
        """Whether a checkpoint with this value of what is watched would be the best of the run so far."""
        return self.keep_best and self.watched.is_better(value, self.best)

    def saved(self, step: int, *, is_best: bool, value: float | None, keeps_older: bool = False) -> None:
        """The checkpoint of `step` is whole: update the links, and only then remove older ones, unless `keeps_older`.
        Raises: OSError: a link could not be written. It still points at a whole checkpoint."""
        new = self.folder / folder_name(step)
        point(self.folder / LATEST, new.name)
        if is_best:
            assert value is not None
            point(self.folder / BEST, new.name)
            self.best = value
        if not self.keep_last or keeps_older:
            return
        # Later steps exist if the run resumed from an earlier one: they are not older.
        older = [folder for number, folder in step_folders(self.folder) if number <= step]
        best = (self.folder / BEST).resolve()
        for folder in older[self.keep_last :]:
            if folder.resolve() != best:
                _remove(folder)


def folder_name(step: int) -> str:
    """`step-000050`."""
    return f"step-{step:06d}"


def point(name: Path, target: str) -> None:
    """Make `name` a symbolic link to its sibling `target`, atomically."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)  # relative: the output may be moved
    os.replace(temporary, name)
    fsync(name.parent)


def clear_leftovers(output: Path) -> None:
    """Remove temporary folders and files of killed saves in `output`.

    A folder that was renamed for its successor, which was never completed, gets its name back.
    """
    for folder in (output, output / FOLDER):
        for old in folder.glob(".*.old"):  # nothing, of a folder that is not there
            path = folder / old.name[1:].rsplit(".", 2)[0]
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.replace(path)
        for left in folder.glob(".*.tmp"):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def set_aside(output: Path, done: int, *, ends: Sequence[str] = ENDS) -> str | None:
    """Move results of steps later than `done` in `output` out of the way of the steps that follow now.

    They are of an abandoned continuation of the run, or not whole: `--resume auto` would resume from them, or take a
    finished adapter for the end of the run. Nothing is removed. ends: names of results that only a finished run has.
    Returns a message for the user, None if there is nothing to move.
    """
    kept, later, taken = list[Path](), list[Path](), 0
    for step, folder in step_folders(output / FOLDER):
        of = later if step > done else kept
        of.append(folder)
    ended = [path for name in ends if (path := output / name).exists() or path.is_symlink()]
    if not later and not ended:
        return None
    (output / FOLDER).mkdir(parents=True, exist_ok=True)
    for earlier in (output / FOLDER).glob(f"{ASIDE}-*"):
        if earlier.name[-1].isdecimal():
            taken = max(taken, int(earlier.name.rpartition("-")[2]))
    away = output / FOLDER / f"{ASIDE}-{taken + 1}"
    away.mkdir()
    if (output / "metrics.jsonl").is_file():
        shutil.copy2(output / "metrics.jsonl", away)
    # First the links, then their targets: no link ever dangles.
    for name in (LATEST, BEST):
        link = output / FOLDER / name
        if link.is_symlink() and link.resolve() in [folder.resolve() for folder in later]:
            if name == LATEST and kept:
                point(link, kept[0].name)
            else:
                link.unlink()
    for each in (*ended, *later):
        os.replace(each, away / each.name)
    fsync(away)
    fsync(output / FOLDER)
    names = ", ".join(sorted(each.name for each in (*ended, *later)))
    return f"set aside in {away}, as this run goes on after step {done}: {names}"


def _remove(folder: Path) -> None:
    # Rename first: if killed half-way, this leaves no checkpoint with some of its files.
    away = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp"))
    with contextlib.suppress(OSError):
        os.replace(folder, away / folder.name)
    shutil.rmtree(away, ignore_errors=True)
