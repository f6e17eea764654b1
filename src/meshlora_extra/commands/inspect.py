"""`meshlora inspect FOLDER`: the files of a run, and whether they are intact.

Owns: showing a run's output, a checkpoint or an adapter, file by file. Does not own: what makes one intact
(`run.checkpoint.manifest`), which one a run resumes from (`run.checkpoint.resuming`). Nothing is written, and no
model is loaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshlora.cli.arguments import add_json, check_json, write_result
from meshlora_ground.errors import MeshloraError, UserError

if TYPE_CHECKING:
    from meshlora.run.checkpoint.manifest import Saved

_OF_A_RUN = ("checkpoints", "adapter", "initial", "metrics.jsonl", ".lock")


def add(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show and check what a run left: its output, a checkpoint or an adapter",
        description="Every file is compared with the manifest. Exit code 0: all is whole; 1: something is not; "
        "2: the folder is nothing that a run left. A plain PEFT adapter has no manifest: it is looked at as by "
        "`meshlora judge adapter`.",
    )
    inspect.add_argument("folder", metavar="FOLDER", help="output of a run, a checkpoint, or an adapter")
    add_json(inspect)
    inspect.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> None:
    from meshlora.run.checkpoint.manifest import is_saved
    from meshlora_ground.console import Console

    check_json(options)
    folder, console = Path(options.folder), Console()
    if _is_plain(folder):
        rows, broken = _plain(folder)
    elif is_saved(folder):
        rows, broken = _saved(folder)
    elif _is_run(folder):
        rows, broken = _run(folder)
    else:
        rule = "there is nothing in it that a run left"
        raise UserError(f"{folder}", rule, "give an output, a checkpoint or an adapter")
    if rows:
        console.show_rows(rows)
    write_result(options.json, {"folder": f"{folder}", "is_whole": not broken, "problems": broken, "found": dict(rows)})
    if len(broken) == 1:
        raise MeshloraError(f"{folder}: {broken[0]}")
    if broken:
        raise MeshloraError(f"{folder}: {len(broken)} folders are not whole")


def _is_run(folder: Path) -> bool:
    try:
        return any((folder / name).exists() for name in _OF_A_RUN)
    except OSError:
        return False


def _is_plain(folder: Path) -> bool:
    """Whether it is an adapter that no run of meshlora has saved: PEFT's two files, and no manifest."""
    from meshlora.adapter.formats.peft_format import CONFIG_FILE, WEIGHTS_FILE
    from meshlora.run.checkpoint.manifest import FILE, STATE_FILE
    from meshlora_ground.pickled import OLD_WEIGHTS

    try:
        there = {file.name for file in folder.iterdir()}
    except (OSError, ValueError):
        return False
    # A save of a run that lost its manifest is damaged, not plain.
    is_adapter = CONFIG_FILE in there and bool({WEIGHTS_FILE, OLD_WEIGHTS} & there)
    return is_adapter and not {FILE, STATE_FILE} & there


def _plain(folder: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """What is shown of an adapter without a manifest, and what speaks against it: the judge's findings."""
    from meshlora.run.checkpoint.identity import shown
    from meshlora_judge.adapter_files.verdict import judge_folder

    rows = [("adapter", "of PEFT, with no manifest to compare its files with: its values and names are looked at")]
    try:
        verdict = judge_folder(folder)
    except UserError as error:
        return rows, [str(error)]
    names = ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules", "trainable_token_indices")
    rows += [(name, shown(f"{verdict.config[name]}")) for name in names if verdict.config.get(name) is not None]
    rows.append(("found", verdict.description))
    rows += [("note", f"{note}") for note in verdict.notes]
    return rows, [] if verdict.is_sound else [verdict.words()]


def _saved(folder: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """What is shown of a checkpoint or an adapter, and the problems found."""
    from meshlora.run.checkpoint.manifest import NotWholeError, file_mistake, read_manifest

    try:
        saved = read_manifest(folder)
    except NotWholeError as error:
        return [], [str(error)]
    rows, mistakes = _rows(saved), []
    for name, file in sorted(saved.files.items()):
        mistake = file_mistake(saved, name)
        rows.append((name, f"{file.num_bytes:,} bytes, {mistake or 'as they were saved'}"))
        if mistake:
            mistakes.append(mistake)
    return rows, mistakes


def _rows(saved: Saved) -> list[tuple[str, str]]:
    """(name, value) of everything in a manifest except its files."""
    from meshlora.run.checkpoint.identity import shown

    steps = f"after {saved.step:,} of {saved.steps:,} steps"
    if saved.step > saved.updates:
        steps += f", {saved.step - saved.updates:,} of them left out"  # their gradients were not finite
    rows: list[tuple[str, str]] = [(saved.kind, steps)]
    if saved.topology:
        rows.append(("topology", saved.topology))
    if saved.eval_loss is not None:
        rows.append(("eval loss", f"{saved.eval_loss:.6g}"))
    if saved.loss_scale:
        rows.append(("loss scale", f"{saved.loss_scale['scale']:g}"))
    if saved.versions:
        words = (f"{shown(name)} {shown(value)}" for name, value in sorted(saved.versions.items()))
        rows.append(("versions", ", ".join(words)))
    return rows + [(shown(name), shown(value)) for name, value in sorted(saved.identity.items())]


def _run(output: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """What is shown of the output of a run, and one problem per broken folder."""
    from meshlora.run.checkpoint.identity import shown
    from meshlora.run.checkpoint.manifest import NotWholeError, Saved, read_whole
    from meshlora.run.checkpoint.resuming import FINISHED, FOLDER, step_folders
    from meshlora.run.lock import holder_of

    folders: list[tuple[Path, Any]] = []
    for name in ("initial", FINISHED):
        folder = output / name
        if folder.exists() or folder.is_symlink():  # a broken link is a problem to show
            folders.append((folder, name))
    # Between the two, the newest first.
    folders[1:1] = [(folder, "checkpoint") for _, folder in reversed(step_folders(output / FOLDER))]
    rows, whole, broken = [], dict[Path, Saved](), []
    for folder, kind in folders:
        try:
            saved = whole[folder] = read_whole(folder, kinds=(kind,))
            rows.append((f"{folder.relative_to(output)}", f"whole, after {saved.step:,} of {saved.steps:,} steps"))
        except NotWholeError as error:
            rows.append((f"{folder.relative_to(output)}", f"not whole: {error.rule}"))
            broken.append(str(error))
    for name in ("latest", "best"):
        link = output / FOLDER / name
        if link.is_symlink():
            rows.append((f"{FOLDER}/{name}", shown(f"{link.readlink()}")))
    # Resuming takes the newest whole one.
    last = max((saved.step for saved in whole.values() if saved.kind == "checkpoint"), default=0)
    if output / FINISHED in whole:
        rows.append(("--resume auto", f"all {whole[output / FINISHED].steps:,} steps are done, if the run is the same"))
    elif last:
        rows.append(("--resume auto", f"goes on after step {last:,}, if the run is the same"))
    else:
        rows.append(("--resume auto", "begins at the first step"))
    if (holder := holder_of(output)) is not None:
        rows.append(("trains now", str(holder)))
    return rows, broken
