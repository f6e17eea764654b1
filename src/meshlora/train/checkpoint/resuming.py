"""What a run that was asked to go on finds in its output: all its steps, a checkpoint, or nothing.

Owns: which checkpoint of a run is the last whole one, whether what is there is of the run that is asked for, and
whether a finished adapter is believed. Does not own: when a folder is whole (`train.checkpoint.manifest`), what becomes
of what is not gone on with (`train.checkpoint.retention`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshlora.common.errors import UserError
from meshlora.common.file_hash import FileHashes
from meshlora.common.versions import versions
from meshlora.train.checkpoint.identity import Contents, check_same, identity_of_contents, other_versions
from meshlora.train.checkpoint.manifest import NotWholeError, Saved, read_whole

FOLDER, FINISHED = "checkpoints", "adapter"


@dataclass(frozen=True)
class GoingOn:
    """What a run goes on with.

    Attributes:
        resume: the checkpoint, None: it begins at its first step. is_finished: it has all its steps already.
        identity: of the run; with the content of its files where that had to be known.
        notes: what the user should know.
    """

    resume: Saved | None
    is_finished: bool
    identity: Mapping[str, str]
    notes: tuple[str, ...]


def going_on(
    output: Path, given: str, *, steps: int, identity: Mapping[str, str], files: Contents, despite: Collection[str]
) -> GoingOn:
    """What a run of `steps` steps goes on with in `output`, for `--resume GIVEN`. Nothing is written.

    identity: of the run, but for its `files`, which are read only where there is something to go on with and all else
    is the same. despite: names of what may differ from the run that saved it.

    Raises:
        UserError: what is there is of another run, by name; or the checkpoint that was given is not whole.
    """
    notes: list[str] = []
    own = dict(identity)

    def is_same_run(found: Saved, what: str, way_out: str) -> None:
        nonlocal own
        there = {name: value for name, value in found.identity.items() if name not in files}
        free = [name for name in despite if name not in files]
        check_same(what, there, identity, despite=free, way_out=way_out)
        if own.keys() == identity.keys():
            with FileHashes(file for each in files.values() for file in each) as hashes:
                own |= identity_of_contents(files, hashes)
        check_same(what, found.identity, own, despite=despite, way_out=way_out)
        if different := other_versions(found.versions, versions()):
            notes.append(f"{what} was made with other versions: {different}")

    adapter = output / FINISHED
    if given == "auto" and (adapter.exists() or adapter.is_symlink()):
        try:
            finished = read_whole(adapter, kinds=("adapter",))
        except NotWholeError as error:
            notes.append(f"not believed that all steps are done: {error}")
        else:
            is_same_run(finished, f"the finished adapter in {output}", "choose another train.output")
            if finished.step == steps:
                return GoingOn(None, True, own, tuple(notes))
    checkpoint = find_checkpoint(output, given, notes.append)
    if checkpoint is not None:
        is_same_run(checkpoint, f"{checkpoint.folder}", "start a new run")
        if checkpoint.step > steps:
            rule = f"it has {checkpoint.step} steps, more than the {steps} of this run"
            raise UserError(f"--resume: {checkpoint.folder}", rule, "give an earlier one")
    else:
        notes.append(f"no checkpoint in {output} to go on from: the run begins at its first step")
    return GoingOn(checkpoint, False, own, tuple(notes))


def find_checkpoint(output: Path, given: str, say: Callable[[str], None]) -> Saved | None:
    """The checkpoint in folder `given`; for "auto" the last whole one of the run in `output`, None where there is none.

    say: called with a line for each that is damaged.

    Raises:
        UserError: the one that was given is not whole.
    """
    if given != "auto":
        return read_whole(Path(given))
    # Not by the name `latest`: a rank killed at the right moment leaves a newer one that is whole.
    for _, folder in step_folders(output / FOLDER):
        try:
            return read_whole(folder)
        except NotWholeError as error:
            say(f"passed over: {error}")
    return None


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """(step, checkpoint) of all in `folder`, whole or not, the newest first."""
    numbers = [(found.name.removeprefix("step-"), found) for found in folder.glob("step-*")]
    return sorted(((int(number), found) for number, found in numbers if number.isdecimal()), reverse=True)
