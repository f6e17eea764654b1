"""What a resumed run finds in its output: a finished adapter, a checkpoint, or nothing.

Owns: finding the last whole checkpoint, checking that it is of the same run, and accepting a finished adapter. Does not
own: when a folder is whole (`run.checkpoint.manifest`), the fate of later checkpoints (`run.checkpoint.retention`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshlora.run.checkpoint.identity import DATE, Contents, check_same, identity_of_contents, other_versions
from meshlora.run.checkpoint.manifest import NotWholeError, Saved, read_manifest, read_whole
from meshlora_ground.errors import UserError
from meshlora_ground.file_hash import FileHashes
from meshlora_ground.versions import versions

FOLDER, FINISHED = "checkpoints", "adapter"


@dataclass(frozen=True)
class GoingOn:
    """The state that a run resumes from.

    Attributes:
        resume: the checkpoint; None: the run begins at its first step. is_finished: all its steps are done already.
        identity: of the run; with the content of its files if they had to be read.
        notes: messages for the user.
    """

    resume: Saved | None
    is_finished: bool
    identity: Mapping[str, str]
    notes: tuple[str, ...]


def going_on(
    output: Path,
    given: str,
    *,
    steps: int,
    identity: Mapping[str, str],
    files: Contents,
    despite: Collection[str],
    stops_early: Callable[[int], bool] = lambda step: False,
) -> GoingOn:
    """The state in `output` that a run of `steps` steps resumes from with `--resume GIVEN`. Nothing is written.

    identity: of the run, without its `files`, which are read only if there is something to resume from and all else is
    the same. despite: names of settings that may differ from the run that saved it. stops_early: whether the run ends
    after so many steps, though there are more.

    Raises:
        UserError: the output is of another run, by the name that differs; or the given checkpoint is not whole.
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
            if finished.step == steps or stops_early(finished.step):
                return GoingOn(None, True, own, tuple(notes))
            if finished.step < finished.steps:
                notes.append(f"not believed that all steps are done: finished adapter {adapter} is of {finished.step}")
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
    """The checkpoint in folder `given`; for "auto" the last whole one of the run in `output`, None if there is none.

    say: called with a message for each damaged one.

    Raises:
        UserError: the given one is not whole.
    """
    if given != "auto":
        return read_whole(Path(given))
    # Not via `latest`: a rank killed at the right moment leaves a newer whole one.
    for _, folder in step_folders(output / FOLDER):
        try:
            return read_whole(folder)
        except NotWholeError as error:
            say(f"passed over: {error}")
    return None


def day_of_run(output: Path, given: str) -> str | None:
    """The day that chat templates write in the run which `--resume GIVEN` goes on with, as its newest manifest says;
    None if there is none, or its template asks for no day. With `initial`: a run may have no checkpoint yet.
    """
    folders = [Path(given)]
    if given == "auto":
        checkpoints = [folder for _, folder in step_folders(output / FOLDER)]
        folders = [output / FINISHED, *checkpoints, output / "initial"]
    for folder in folders:
        if (found := _manifest_of(folder)) is not None:
            return found.identity.get(DATE)
    return None


def said_of_adapter(folder: Path, name: str) -> str | None:
    """`name` of the run that made the adapter in `folder`, where its manifest says it: the day that chat templates
    wrote (DATE), the hash of its data (DATA)."""
    found = _manifest_of(folder)
    return None if found is None else found.identity.get(name)


def _manifest_of(folder: Path) -> Saved | None:
    try:
        return read_manifest(folder)
    except NotWholeError:
        return None


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all checkpoints in `folder`, whole or not, the newest first."""
    numbers = [(found.name.removeprefix("step-"), found) for found in folder.glob("step-*")]
    return sorted(((int(number), found) for number, found in numbers if number.isdecimal()), reverse=True)
