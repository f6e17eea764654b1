"""Early stopping: the rule, a run that ends by it, and one that is resumed in between."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from meshlora.run.checkpoint.manifest import read_whole
from meshlora.run.config.endings import EarlyStopping
from meshlora.run.config.file import read_run
from meshlora.run.early_stopping import Patience, values_until
from meshlora.run.run import train
from meshlora.run.together import prepare_run
from meshlora.run.trained import TrainedAdapter
from meshlora_ground.errors import UserError
from tests.run_files import copy_lines, metrics_of, write_run_file

LOSSES = [1.0, 0.9, 0.95, 0.92, 0.5, 0.4]


def test_small_improvement_is_none() -> None:
    assert not Patience(EarlyStopping(patience=2), [1.0, 0.99, 0.98]).is_out
    patience = Patience(EarlyStopping(patience=2, min_delta=0.05), [1.0, 0.99, 0.98])
    assert (patience.is_out, patience.best) == (True, 1.0)
    # Two small ones together are one.
    assert Patience(EarlyStopping(patience=3, min_delta=0.05), [1.0, 0.97, 0.94]).best == 0.94


def test_loss_that_is_no_number_is_no_improvement() -> None:
    assert Patience(EarlyStopping(patience=2), [1.0, math.nan, math.inf]).is_out
    assert Patience(EarlyStopping(patience=1), [math.nan]).is_out


def test_without_patience_nothing_ends() -> None:
    assert not Patience(EarlyStopping(), [1.0] * 100).is_out


def test_evaluations_between_those_of_the_rule_do_not_count(tmp_path: Path) -> None:
    """One after the last step of a run, which goes on with more."""
    lines = [{"step": step, "eval_loss": float(step), "eval_tokens": 1} for step in (2, 4, 5, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"step": 4}, *lines]))
    assert values_until(tmp_path / "metrics.jsonl", 6, 2) == {2: 2.0, 4: 4.0, 6: 6.0}


Run = Callable[..., bool]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(resume=...)`: trains six steps with an evaluation after each, whose losses are `LOSSES`; whether it ran."""
    copy_lines("train", tmp_path / "train.jsonl", 0, 4)
    copy_lines("train", tmp_path / "eval.jsonl", 0, 2)
    options = {"steps": 6, "eval_every": 1, "save_every": 1, "early_stopping": {"patience": 2}, "batch_size": 1}
    data = {"eval": str(tmp_path / "eval.jsonl"), "max_length": 16, "train_on": "everything"}
    file = write_run_file(tmp_path / "out.yaml", train=options, data=data)
    monkeypatch.setattr(TrainedAdapter, "evaluate", lambda self, _: (LOSSES[self.done - 1], 1))

    def started(resume: str | None = None) -> bool:
        prepared = prepare_run(read_run(file), world=1, resume=resume)
        return not prepared.is_finished and train({"": prepared})

    return started


def evaluations(output: Path) -> list[float]:
    return [line["eval_loss"] for line in metrics_of(output) if "eval_loss" in line]


def test_run_ends_at_the_evaluation_that_is_one_too_many(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run()
    assert evaluations(output) == LOSSES[:4]
    saved = read_whole(output / "adapter", kinds=("adapter",))
    assert (saved.step, saved.steps) == (4, 6)
    assert "step 4: stops early: 2 evaluations have not improved 0.9000" in capsys.readouterr().out
    assert "4 of 6 steps" in (output / "adapter" / "README.md").read_text()
    assert not run(resume="auto"), "it is finished"


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(["adapter", "checkpoints/step-000004"], id="a step"),
        pytest.param(["adapter"], id="its end", marks=pytest.mark.proof),
    ],
)
def test_resumed_run_counts_on(lost: list[str], run: Run, tmp_path: Path) -> None:
    """It was killed before its last evaluation, or after its last checkpoint."""
    output = tmp_path / "out"
    assert run()
    for name in lost:
        shutil.rmtree(output / name)
    assert run(resume="auto")
    assert evaluations(output) == LOSSES[:4]
    assert read_whole(output / "adapter", kinds=("adapter",)).step == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"early_stopping": {"patience": 2}}, "it is decided by evaluations; give train.eval_every"),
        ({"early_stopping": {"min_delta": 0.1}}, "it has no effect without patience"),
        ({"early_stopping": {"patience": -1}}, "patience"),
        ({"early_stopping": {"pacience": 1}}, "did you mean 'patience'"),
    ],
)
def test_mistake_is_said(options: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        read_run(write_run_file(tmp_path / "run.yaml", train=options))
