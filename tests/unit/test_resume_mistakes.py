"""What `--resume auto` and a held output refuse, or no longer believe, through the command line and on a real base."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshlora.cli.job
from meshlora.cli.main import main
from meshlora.run.checkpoint.identity import check_same, identity_of_contents
from meshlora.run.config.file import read_run
from meshlora.run.lock import FILE as LOCK
from meshlora.run.lock import hold
from meshlora.run.prepared import Prepared
from meshlora.run.run import prepare_output
from meshlora.run.together import prepare_run
from meshlora_ground.errors import UserError
from meshlora_ground.file_hash import FileHashes
from tests.manifests import sign
from tests.unit.mistakes import Setup, message_of, setting
from tests.unit.saved import save, save_steps

pytestmark = pytest.mark.usefixtures("nothing_has_happened_yet")
TRAIN = ["train", "{folder}/run.yaml", "--nproc", "2", "--no-preflight", "--resume", "auto"]
STEPS = 4


def _identity(run: Prepared) -> dict[str, str]:
    with FileHashes(file for each in run.files.values() for file in each) as hashes:
        return {**run.identity, **identity_of_contents(run.files, hashes)}


@pytest.fixture
def finished(setup: Setup) -> Setup:
    """The output of a run that has all its steps, and checkpoints of two of them."""
    setup.command = TRAIN
    identity = _identity(setup.prepared())
    output = setup.folder / "output"
    save_steps(output, 2, 3, steps=STEPS, identity=identity)
    save(output / "adapter", "adapter", step=STEPS, steps=STEPS, identity=identity)
    return setup


def _words(setup: Setup, capfd: pytest.CaptureFixture[str]) -> str:
    setup.write()
    (line,) = setup.command_lines()
    return message_of(line, setup, capfd)


def _resumed(setup: Setup, *despite: str) -> Prepared:
    setup.write()
    return prepare_run(read_run(setup.folder / "run.yaml"), resume="auto", despite=despite)


def _every_weight(setup: Setup) -> None:
    """Other weights, in as many bytes, at the same time."""
    file = setup.model / "model.safetensors"
    before = file.stat()
    setup.weights(lambda tensors: tensors.update({name: tensor.neg() for name, tensor in tensors.items()}))
    assert file.stat().st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _chat_template(setup: Setup) -> None:
    """It makes no other tokens of prompts and completions."""
    (setup.model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


OTHERS: dict[str, tuple[str, Callable[[Setup], Any]]] = {
    "rate": ("train.lr", setting("train.lr", 2e-3)),
    "rank": ("lora", setting("lora.r", 8)),
    "data": ("data", lambda s: s.data({"prompt": "def g():", "completion": " return 1"})),
    "steps": ("steps", setting("train.steps", 600)),
    "base of the same size": ("model", _every_weight),
    "config.json": ("model", lambda s: s.config(rms_norm_eps=1e-3)),
    "tokenizer": ("tokenizer", _chat_template),
    "attention": ("model.attn_implementation", setting("model.attn_implementation", "eager")),
    "dtype": ("model.dtype", setting("model.dtype", "float64")),
}


@pytest.mark.long
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("ends", ["finished", "checkpoint"])
def test_what_is_there_of_another_run_is_refused_by_name(
    other: str, ends: str, finished: Setup, capfd: pytest.CaptureFixture[str]
) -> None:
    name, change = OTHERS[other]
    if ends == "checkpoint":
        shutil.rmtree(finished.folder / "output" / "adapter")
    change(finished)
    message = _words(finished, capfd)
    assert message.startswith("--resume: ")
    assert ("the finished adapter in" in message) == (ends == "finished")
    assert f"it is of a run with other {name}" in message
    assert f"--resume-despite {name}" in message
    run = _resumed(finished, name)
    assert run.is_finished == (ends == "finished" and name != "steps")
    assert run.is_finished or (run.resume is not None and run.resume.step == 3)


def test_all_that_differs_is_said_at_once() -> None:
    """But for the hash of data, which other values may have made another; all are named as what to leave out."""
    there = {"data": "sha256:0", "lora": "r 4", "steps": "9", "tokenizer": "sha256:1", "train.lr": "1e-3"}
    here = {"data": "sha256:2", "lora": "r 8", "steps": "5", "tokenizer": "sha256:3", "train.lr": "2e-3"}
    with pytest.raises(UserError) as said:
        check_same("step-3", there, here, despite=["steps"], way_out="start a new run")
    assert str(said.value) == (
        "--resume: step-3: it is of a run with other lora: r 4 there, r 8 here, and other tokenizer, and other "
        "train.lr: 1e-3 there, 2e-3 here; go on all the same with --resume-despite data --resume-despite lora "
        "--resume-despite tokenizer --resume-despite train.lr, or start a new run"
    )
    with pytest.raises(UserError, match="--resume-despite data, or"):
        check_same("step-3", there, there | {"data": "sha256:2"}, despite=[], way_out="start a new run")


def test_same_run_with_all_its_steps_is_finished(finished: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    """So that the refusals above say something; and what changes no step may differ."""
    finished.set("train.micro_batch_size", 1)
    finished.write()
    assert main([part.format(folder=finished.folder) for part in TRAIN]) == 0
    assert capfd.readouterr().out == f"all 4 steps are done: {finished.folder}/output/adapter\n"
    assert not (finished.folder / "output" / LOCK).exists()


DAMAGED: dict[str, Callable[[Path], Any]] = {
    "empty": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "cut to 100 bytes": lambda folder: os.truncate(folder / "adapter_model.safetensors", 100),
    "without its manifest": lambda folder: (folder / "manifest.json").unlink(),
    "of fewer steps than it says": lambda folder: sign(folder, step=3, updates=3),
    "a checkpoint": lambda folder: (shutil.rmtree(folder), shutil.copytree(_checkpoint(folder), folder)),
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    "a link to nothing": lambda folder: (shutil.rmtree(folder), folder.symlink_to("nowhere")),
}


def _checkpoint(adapter: Path) -> Path:
    return adapter.parent / "checkpoints" / "step-000003"


@pytest.mark.long
@pytest.mark.parametrize("how", DAMAGED)
@pytest.mark.parametrize("checkpoints", [True, False])
def test_finished_adapter_that_is_not_whole_is_set_aside_and_trained_again(
    how: str, checkpoints: bool, finished: Setup
) -> None:
    output = finished.folder / "output"
    DAMAGED[how](output / "adapter")
    if not checkpoints:
        shutil.rmtree(output / "checkpoints")
    run = _resumed(finished)
    assert not run.is_finished
    assert (run.resume.step if run.resume is not None else 0) == (3 if checkpoints else 0)
    assert any(note.startswith("not believed that all steps are done: finished adapter ") for note in run.notes)
    before = sorted(file.name for file in (output / "adapter").glob("*"))
    (said,) = prepare_output(run)
    assert "checkpoints/set-aside-1" in said
    aside = output / "checkpoints" / "set-aside-1" / "adapter"
    assert aside.is_symlink() or aside.exists()
    assert sorted(file.name for file in aside.glob("*")) == before
    assert not (output / "adapter").exists()


def test_checkpoints_that_are_all_broken_are_set_aside_and_not_removed(finished: Setup) -> None:
    output = finished.folder / "output"
    shutil.rmtree(output / "adapter")
    for folder in (output / "checkpoints").iterdir():
        (folder / "manifest.json").unlink()
    run = _resumed(finished)
    assert run.resume is None
    prepare_output(run)
    aside = output / "checkpoints" / "set-aside-1"
    assert sorted(folder.name for folder in aside.iterdir()) == ["step-000002", "step-000003"]
    assert [folder.name for folder in (output / "checkpoints").iterdir()] == ["set-aside-1"]


def test_base_that_was_only_touched_is_the_same(finished: Setup) -> None:
    (finished.model / "model.safetensors").touch()
    assert _resumed(finished).is_finished


def test_start_adapter_is_known_by_its_content_and_not_by_its_name(setup: Setup) -> None:
    setup.from_adapter()
    before = _identity(setup.prepared())
    shutil.move(setup.adapter, setup.folder / "moved")
    setup.set("adapter", str(setup.folder / "moved"))
    moved = _identity(setup.prepared())
    assert moved == before
    file = setup.folder / "moved" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 99}))
    other = _identity(setup.prepared())
    assert {name for name in other if other[name] != before[name]} == {"adapter"}


def test_reading_weights_comes_after_all_that_can_be_refused_without(
    finished: Setup, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished.set("train.lr", 2e-3)
    monkeypatch.setattr("meshlora.run.checkpoint.resuming.FileHashes", lambda _: pytest.fail("the base is read"))
    assert "other train.lr" in _words(finished, capfd)


# --- two runs at once


@pytest.mark.parametrize("resume", [True, False])
def test_second_run_in_an_output_is_refused_before_it_touches_anything(
    resume: bool, setup: Setup, capfd: pytest.CaptureFixture[str]
) -> None:
    output = setup.folder / "output"
    setup.command = TRAIN if resume else TRAIN[:-2]
    half = output / "checkpoints" / ".step-000002.x.tmp"
    if resume:
        save_steps(output, 1, identity=_identity(_fresh(setup)))
        half.mkdir()  # of a save that goes on
    held, end = threading.Event(), threading.Event()

    def other_run() -> None:
        with hold(output):
            held.set()
            end.wait(60)

    thread = threading.Thread(target=other_run)
    thread.start()
    try:
        held.wait(60)
        message = _words(setup, capfd)
    finally:
        end.set()
        thread.join()
    assert f"train.output={output}: another run trains there: process {os.getpid()} on host " in message
    assert half.exists() == resume


def _fresh(setup: Setup) -> Prepared:
    """The same run in another output."""
    setup.write()
    config = read_run(setup.folder / "run.yaml")
    return prepare_run(dataclasses.replace(config, train=dataclasses.replace(config.train, output="elsewhere")))


def test_output_that_another_run_used_until_it_was_held_is_read_again(
    setup: Setup, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was empty when this run was checked, and another trained and ended before this one held it."""
    from meshlora.cli import job

    setup.command, output = TRAIN[:-2], setup.folder / "output"
    prepare_runs = job.prepare_runs

    def and_another_trains(*given: Any, **options: Any) -> Any:
        runs = prepare_runs(*given, **options)
        save(output / "adapter", "adapter", step=STEPS, steps=STEPS)
        return runs

    monkeypatch.setattr(job, "prepare_runs", and_another_trains)
    setup.write()
    assert main([part.format(folder=setup.folder) for part in setup.command]) == 2
    assert "it holds a run already" in capfd.readouterr().err
    assert sorted(file.name for file in output.iterdir()) == ["adapter"]


def test_output_is_held_until_the_launch_has_ended(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    output = setup.folder / "output"
    monkeypatch.setattr(meshlora.cli.job, "launch", lambda *_, **__: seen.append((output / LOCK).is_file()))
    setup.write()
    assert main(["train", str(setup.folder / "run.yaml"), "--nproc", "2", "--no-preflight"]) == 0
    assert seen == [True]
    assert not output.exists()
