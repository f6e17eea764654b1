"""Shares of a run and parts of an epoch: whole steps, the same for all that read them."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from meshlora.run.checkpoint.resuming import step_folders
from meshlora.run.config.file import read_run, read_runs
from meshlora.run.config.run_file import TrainConfig
from meshlora.run.in_words import rates_in_words
from meshlora.run.learning_rate import learning_rate
from meshlora.run.length import in_steps, num_steps
from meshlora.run.run import train
from meshlora.run.together import prepare_run, prepare_runs
from meshlora_ground.errors import UserError
from tests.for_each import for_each
from tests.run_files import copy_lines, metrics_of, write_run_file

NUMBER = 10


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """`file(train={...})`: a run file on `NUMBER` records in batches of three: four steps an epoch."""
    copy_lines("train", tmp_path / "train.jsonl", 0, NUMBER)
    copy_lines("train", tmp_path / "eval.jsonl", 0, 2)

    def written(**groups: Any) -> Path:
        options = {"batch_size": 3, "steps": None, "epochs": 3}
        data = {"eval": str(tmp_path / "eval.jsonl"), "max_length": 16, "train_on": "everything"}
        groups = groups | {"train": options | groups.get("train", {}), "data": data | groups.get("data", {})}
        return write_run_file(tmp_path / "out.yaml", **groups)

    return written


@for_each("ratio", [0.01, 0.03, 0.07, 0.1, 0.29, 0.5])
@for_each("steps", [7, 30, 100, 189])
def test_a_share_is_rounded_as_transformers_rounds_it(steps: int, ratio: float, tmp_path: Path) -> None:
    theirs = TrainingArguments(str(tmp_path), warmup_steps=ratio).get_warmup_steps(steps)
    found = in_steps(TrainConfig(output="out", steps=steps, warmup_ratio=ratio), steps=steps, num_sequences=9)
    assert found.warmup_steps == theirs == math.ceil(steps * ratio)


def test_a_warm_up_by_its_share_has_the_rates_of_its_steps(file: Any) -> None:
    """And is the same run: it is resumed by the other name."""
    given = {"warmup_ratio": 0.2, "warmup_from_zero": True, "schedule": "cosine"}
    run = prepare_run(read_run(file(train=given)))
    by_steps = prepare_run(read_run(file(train=given | {"warmup_ratio": 0.0, "warmup_steps": 3})))
    assert run.steps == 12
    assert "train.warmup_ratio=0.2: 3 of 12 steps" in run.notes
    assert rates_in_words(run.config.train).endswith("cosine after 3 steps of warm-up, the first at 0")
    rates = [[learning_rate(step, options=one.config.train, steps=12) for step in range(12)] for one in (run, by_steps)]
    assert rates[0] == rates[1]
    assert rates[0][:4] == pytest.approx([0, 2e-4 / 3, 4e-4 / 3, 2e-4])
    assert run.identity == by_steps.identity
    # Manifests of runs before there were other schedules do not have these.
    assert not {"train.num_cycles", "train.power", "train.timescale", "train.decay_type"} & run.identity.keys()
    powers = {"schedule": "polynomial", "power": 2.0}
    assert prepare_run(read_run(file(train=powers))).identity["train.power"] == "2.0"


def test_share_that_leaves_no_step_is_refused(file: Any) -> None:
    with pytest.raises(UserError, match=r"train\.warmup_ratio=0\.95, or 12 steps: it must be below the 12 steps"):
        prepare_run(read_run(file(train={"warmup_ratio": 0.95})))
    falls = {"warmup_ratio": 0.5, "schedule": "warmup_stable_decay", "decay_steps": 7}
    with pytest.raises(UserError, match=r"train\.warmup_ratio=0\.5, or 6 steps and train\.decay_steps=7: together"):
        prepare_run(read_run(file(train=falls)))


@for_each(
    ("given", "steps"),
    [("epoch", 4), ("epoch/1", 4), ("epoch/2", 2), ("epoch/3", 2), ("epoch/4", 1), ("epoch/9", 1), (3, 3), (0, 0)],
)
def test_parts_of_an_epoch_are_whole_steps(given: int | str, steps: int, file: Any) -> None:
    run = prepare_run(read_run(file(train={"eval_every": given, "save_every": given})))
    assert (run.eval_every, run.save_every) == (steps, steps)
    assert (f"train.eval_every={given}: every {steps} steps" in run.notes) == isinstance(given, str)


def test_an_epoch_has_a_step_at_least() -> None:
    options = TrainConfig(output="out", epochs=0.01, batch_size=64, save_every="epoch")
    assert num_steps(options, 1) == in_steps(options, steps=1, num_sequences=1).save_every == 1


@for_each("given", ["epochs", "epoch/0", "epoch/", "epoch/1.5", "epoch/-1", "4", "", "epoch / 2", "1/4"])
@for_each("key", ["eval_every", "save_every"])
def test_other_text_is_refused(key: str, given: str, file: Any) -> None:
    with pytest.raises(UserError) as caught:
        read_run(file(train={key: given}))
    words = "it must be a number of steps, epoch, or epoch/k for k times in an epoch, as in epoch/4"
    assert str(caught.value) == f"train.{key}={given!r}: {words}"


@for_each("key", ["eval_every", "save_every"])
def test_a_stream_has_no_epochs(key: str, file: Any) -> None:
    options = {"objective": "policy", "steps": 4, "epochs": None, key: "epoch"}
    with pytest.raises(UserError, match=rf"train\.{key}=epoch.*a stream has no epochs; give it in steps"):
        read_run(file(train=options, data={"follow_s": 1.0}))


def test_run_evaluates_and_saves_by_epochs_and_does_so_after_resuming(file: Any, tmp_path: Path) -> None:
    options = {"eval_every": "epoch/2", "save_every": "epoch", "epochs": 2}
    output = tmp_path / "out"

    def course() -> tuple[list[int], list[int]]:
        evaluated = [line["step"] for line in metrics_of(output) if "eval_loss" in line]
        return evaluated, sorted(step for step, _ in step_folders(output / "checkpoints"))

    train({"": prepare_run(read_run(file(train=options)), world=1)})
    assert course() == ([2, 4, 6, 8], [4])
    shutil.rmtree(output / "adapter")  # killed after its fourth step
    again = prepare_run(read_run(file(train=options)), world=1, resume="auto")
    assert again.start_step == 4
    train({"": again})
    assert course() == ([2, 4, 6, 8], [4])


def test_each_of_several_adapters_has_epochs_of_its_own(file: Any, tmp_path: Path) -> None:
    copy_lines("train", tmp_path / "few.jsonl", 0, 4)
    own = {"data": {"train": str(tmp_path / "few.jsonl")}, "train": {"warmup_ratio": 0.5, "eval_every": "epoch"}}
    shared = {"save_every": "epoch", "warmup_steps": 2}
    path = file(train=shared, adapters={"one": {"train": {"eval_every": 3}}, "two": own})
    one, two = prepare_runs(read_runs(path)).values()
    assert (one.steps, one.save_every, one.eval_every, one.config.train.warmup_steps) == (12, 4, 3, 2)
    assert (two.steps, two.save_every, two.eval_every, two.config.train.warmup_steps) == (6, 2, 2, 3)


def test_a_rate_far_above_all_recipes_is_said(file: Any) -> None:
    said = [note for note in prepare_run(read_run(file(train={"lr": 2.0}))).notes if "train.lr" in note]
    assert said == [
        "train.lr=2 is far above what adapters are trained with, 1e-5 to 1e-3: a run diverges there; meshlora "
        "lr-find tries rates"
    ]
    assert not [note for note in prepare_run(read_run(file(train={"lr": 1e-2}))).notes if "train.lr" in note]
    rates = {"schedule": "cycle", "lr": 0.1, "cycle": {0: 0.1, 3: 0.1}}
    assert not [note for note in prepare_run(read_run(file(train=rates))).notes if "train.lr" in note]
