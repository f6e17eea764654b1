"""A manifest protects all that it says; whatever is broken, `--resume auto` takes the last whole checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshlora.run.checkpoint.manifest import FILE, STATE_FILE, NotWholeError, read_whole
from meshlora.run.checkpoint.resuming import going_on
from meshlora_ground.errors import UserError
from tests.for_each import for_each
from tests.manifests import manifest_of, sign, write
from tests.unit.saved import IDENTITY, save, save_steps

Break = Callable[[Path], Any]
WEIGHTS = "adapter_model.safetensors"


def said(**changes: Any) -> Break:
    """The manifest says something else, with a right hash of itself."""
    return lambda folder: sign(folder, **changes)


def text(content: str | bytes) -> Break:
    return lambda folder: (folder / FILE).write_bytes(content.encode() if isinstance(content, str) else content)


def without(key: str) -> Break:
    def drop(folder: Path) -> None:
        write(folder, {name: value for name, value in manifest_of(folder).items() if name != key})

    return drop


def flip(name: str, byte: int, bit: int = 1) -> Break:
    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[byte] ^= bit
        (folder / name).write_bytes(content)

    return change


def one_bit_of_the_step(folder: Path) -> None:
    """As a disk would: nothing else is changed, and the folder has the name that now fits."""
    content = (folder / FILE).read_text()
    assert content.count('"step": 4') == 1
    (folder / FILE).write_text(content.replace('"step": 4', '"step": 5'))
    folder.rename(folder.with_name("step-000005"))


def file_entry(name: str, entry: Any) -> Break:
    return lambda folder: write(folder, manifest_of(folder) | {"files": manifest_of(folder)["files"] | {name: entry}})


def weights_left_out(folder: Path) -> None:
    files = manifest_of(folder)["files"]
    write(folder, manifest_of(folder) | {"files": {name: files[name] for name in files if name != WEIGHTS}})


def number(folder: Path, name: str, digits: str) -> None:
    content = (folder / FILE).read_text()
    (folder / FILE).write_text(content.replace(f'"{name}": 4', f'"{name}": {digits}'))


def pipe(name: str) -> Break:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return make


BROKEN: dict[str, Break] = {
    "one bit of the step": one_bit_of_the_step,
    "step 5 in the folder of 4": said(step=5),
    "step 0": said(step=0, updates=0),
    "step -3": said(step=-3, updates=0),
    "step True": said(step=True, updates=1),
    "step 10**9": said(step=10**9),
    "step and steps 10**13": said(step=10**13, steps=10**13),
    "step is a float": said(step=4.0),
    "updates -5": said(updates=-5),
    "more updates than steps": said(updates=5),
    "updates False": said(updates=False),
    "more left out than there were": said(updates=3, skipped_in_row=2),
    "evaluation loss NaN": text('{"eval_loss": NaN}'),
    "evaluation loss beyond all numbers": lambda folder: (folder / FILE).write_text(
        (folder / FILE).read_text().replace('"eval_loss": null', '"eval_loss": 1e999')
    ),
    "loss scale without its counts": said(loss_scale={"scale": 2.0}),
    "loss scale of zero": said(loss_scale={"scale": 0.0, "good_steps": 0, "skipped": 0}),
    "topology that is none": said(topology="dp=2,tp=0"),
    "identity is a list": said(identity=[]),
    "identity of numbers": said(identity={"train.lr": 1}),
    "asking that is no text": said(asking={"form": 1}),
    "kind of another folder": said(kind="adapter", step=6, topology=""),
    "format 1": said(format=1),
    "format True": said(format=True),
    "a key more": said(date="today"),
    "a key missing": without("updates"),
    "no hash of itself": lambda folder: (folder / FILE).write_text(
        json.dumps({key: value for key, value in manifest_of(folder).items() if key != "sha256"})
    ),
    "a key twice": lambda folder: (folder / FILE).write_text(
        (folder / FILE).read_text().replace('"step": 4', '"step": 4, "step": 4')
    ),
    "weights left out of files": weights_left_out,
    "weights neither there nor named": lambda folder: (weights_left_out(folder), (folder / WEIGHTS).unlink()),
    "a file more, there and named": lambda folder: (
        (folder / "more.py").write_text(""),
        file_entry("more.py", {"bytes": 0, "sha256": hashlib.sha256().hexdigest()})(folder),
    ),
    "a file that is a number": file_entry(WEIGHTS, 5),
    "a file without sha256": file_entry(WEIGHTS, {"bytes": 200}),
    "a file of negative size": file_entry(WEIGHTS, {"bytes": -1, "sha256": "0" * 64}),
    "a file elsewhere": file_entry("../x", {"bytes": 0, "sha256": "0" * 64}),
    "only files": text('{"files": {"x": 5}}'),
    "not JSON": text(b"\xff\xfe"),
    "nothing in it": text(""),
    "JSON 100,000 deep": text("[" * 100_000),
    "a number of 5,000 digits": lambda folder: number(folder, "step", "4" * 5000),
    "too large to read": text("[" + "0," * (3 << 20) + "0]"),
    "a pipe as manifest": pipe(FILE),
    "a pipe as weights": pipe(WEIGHTS),
    "no manifest": lambda folder: (folder / FILE).unlink(),
    "one bit of the weights": flip(WEIGHTS, 150),
    "weights cut": lambda folder: os.truncate(folder / WEIGHTS, 100),
    "state missing": lambda folder: (folder / STATE_FILE).unlink(),
    "a file more": lambda folder: (folder / "meshlora.json").write_text("{}"),
    "another name": lambda folder: folder.rename(folder.with_name("step-000009")),
    "a file as folder": lambda folder: (
        folder.rename(folder.parent / "away"),
        (folder.parent / folder.name).write_text(""),
    ),
}


@for_each("how", BROKEN)
def test_broken_checkpoint_is_passed_over_for_the_last_whole_one(how: str, tmp_path: Path) -> None:
    earlier, folder = save_steps(tmp_path, 2, 4)
    BROKEN[how](folder)
    found = going_on(tmp_path, "auto", steps=6, identity=IDENTITY, files={}, despite=())
    assert found.resume is not None
    assert found.resume.folder == earlier
    (note,) = found.notes
    assert note.startswith("passed over: checkpoint ")
    assert len(note) < 2000
    assert note.isprintable()
    (broken,) = {*folder.parent.glob("step-*")} - {earlier}
    with pytest.raises(NotWholeError):
        read_whole(broken)


def test_whole_folder_is_read_as_it_was_said(tmp_path: Path) -> None:
    scale = {"scale": 1024.0, "good_steps": 3, "skipped": 1}
    folder = save(tmp_path / "step-000004", updates=2, skipped_in_row=1, eval_loss=0.25, loss_scale=scale)
    (tmp_path / "latest").symlink_to(folder.name)
    for name in (folder, tmp_path / "latest"):
        found = read_whole(name)
        assert (found.folder, found.step, found.steps, found.updates) == (folder, 4, 6, 2)
        assert (found.skipped_in_row, found.eval_loss, found.loss_scale) == (1, 0.25, scale)
        assert (found.identity, found.topology) == (IDENTITY, "dp=2")


def test_folder_from_before_it_was_recorded_how_its_data_asked_is_whole(tmp_path: Path) -> None:
    folder = save(tmp_path / "step-000004")
    without("asking")(folder)
    assert read_whole(folder).asking == {}


def test_finished_adapter_names_no_date_host_path_or_topology(tmp_path: Path) -> None:
    """Two runs of the same run file leave the same bytes."""
    one, other = (save(tmp_path / name / "adapter", "adapter", step=6) for name in ("here", "there"))
    assert (one / FILE).read_bytes() == (other / FILE).read_bytes()
    assert set(manifest_of(one)) == {
        *("format", "kind", "step", "steps", "updates", "identity", "versions", "files", "sha256"),
        *("topology", "eval_loss", "loss_scale", "skipped_in_row", "asking"),
    }
    assert manifest_of(one)["topology"] == ""


@pytest.mark.parametrize("name", sorted(IDENTITY))
def test_other_run_is_refused_by_name_and_taken_where_that_is_said(name: str, tmp_path: Path) -> None:
    save_steps(tmp_path, 4)
    other = IDENTITY | {name: "\x1b[2J" + "9" * 3000}

    def find(*despite: str) -> Any:
        return going_on(tmp_path, "auto", steps=6, identity=other, files={}, despite=despite).resume

    with pytest.raises(UserError, match=f"with other {name}.*--resume-despite {name}") as caught:
        find()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2000
    assert find(name).step == 4
    with pytest.raises(UserError, match="no run has anything of this name"):
        find(name, "train.lrr")


def test_other_versions_are_said_and_not_refused(tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 4)
    sign(folder, versions=manifest_of(folder)["versions"] | {"torch": "1.0"})
    found = going_on(tmp_path, "auto", steps=6, identity=IDENTITY, files={}, despite=())
    assert found.resume is not None
    (note,) = found.notes
    assert "torch 1.0 there" in note


def test_checkpoint_with_more_steps_than_the_run_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 4, identity=IDENTITY)
    with pytest.raises(UserError, match="it has 4 steps, more than the 3 of this run"):
        going_on(tmp_path, "auto", steps=3, identity=IDENTITY, files={}, despite=())
