"""`meshlora lr-find`: the rates of a sweep, what it suggests, and that nothing of its run is left."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from meshlora.cli import train
from meshlora.cli.main import main
from meshlora.cli.train import job_of
from meshlora.run.config.file import read_runs
from meshlora.run.learning_rate import learning_rate
from meshlora_extra.sweep import rates_of, sweep_of
from meshlora_ground.errors import RankFailedError, UserError
from tests.run_files import copy_lines, write_run_file


def valley(rates: list[float], at: float = 1e-2) -> list[float]:
    """Losses that are lowest about the rate `at`."""
    return [2.0 + abs(math.log10(rate / at)) for rate in rates]


def test_a_tenth_of_the_lowest_is_suggested() -> None:
    rates = rates_of(1e-6, 1e0, 61)
    sweep = sweep_of(rates, valley(rates))
    assert sweep.suggested == 1e-3
    assert sweep.note == ""


def test_loss_that_still_falls_at_the_end_is_said_and_one_that_only_rises_refused() -> None:
    rates = rates_of(1e-6, 1e-3, 31)
    assert "still fell at the highest rate" in sweep_of(rates, valley(rates)).note
    with pytest.raises(UserError, match=r"only rose.*lower --from"):
        sweep_of(rates, valley(rates, at=1e-7))


def test_smoothing_is_not_late() -> None:
    """A mean of earlier losses alone would find the valley at a rate that is too high."""
    rates = rates_of(1e-6, 1e-2, 21)
    assert sweep_of(rates, valley(rates, at=1e-4)).suggested == 1e-5


Find = Callable[..., int]


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Find:
    """`find(*arguments, ends=...)`: the command, whose run is only looked at: its losses are those of a valley."""
    copy_lines("train", tmp_path / "train.jsonl", 0, 8)
    # What is of no use in a sweep, and would be refused in it.
    options = {"steps": None, "epochs": 2, "save_every": 1, "warmup_steps": 3, "warmup_from_zero": True}
    options |= {
        "eval_every": "epoch",
        "on_spike": {"factor": 2.0},
        "keep_best": True,
        "early_stopping": {"patience": 2},
        "min_lr": 1e-6,
    }
    options |= {"routing_record": str(tmp_path / "record")}
    data = {"eval": str(tmp_path / "train.jsonl"), "eval_limit": 2}
    file = write_run_file(tmp_path / "run.yaml", train=options, data=data)

    def run(*arguments: str, ends: int | None = None, is_stopped: bool = False) -> int:
        def start(options: argparse.Namespace) -> bool:
            assert job_of(options).ranks_per_gpu == 1  # the arguments are those of meshlora train, with their defaults
            config, *_ = read_runs(options.file, options.overrides).values()
            options_of, steps = config.train, config.train.steps
            assert steps is not None
            rates = [learning_rate(step, options=options_of, steps=steps) for step in range(steps)]
            assert (options_of.save_every, config.data.eval) == (0, None)
            assert (options_of.routing_record, options_of.routing_replay) == (None, None)
            assert all(len(each) < 2**17 for each in options.overrides), "one argument of a rank"
            output = Path(options_of.output)
            output.mkdir()
            lines = [
                {"step": i, "loss": loss, "lr": rate}
                for i, (rate, loss) in enumerate(zip(rates, valley(rates), strict=True))
            ]
            (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:ends]))
            outputs.append(output)
            if ends is not None:
                raise RankFailedError("10 steps in a row were left out")
            return not is_stopped

        monkeypatch.setattr(train, "start", start)
        return main(["lr-find", str(file), *arguments])

    outputs: list[Path] = []
    monkeypatch.setattr(run, "outputs", outputs, raising=False)
    return run


def test_every_step_has_its_own_rate_and_nothing_is_left(
    find: Find, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find("--from", "1e-5", "--to", "1", "--steps", "51", "--json", str(tmp_path / "found.json")) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rates"] == rates_of(1e-5, 1.0, 51)
    assert found["losses"] == pytest.approx(valley(found["rates"]))
    out = capsys.readouterr().out
    assert f"suggested: train.lr: {found['suggested']:g}, a tenth of the rate" in out
    assert not any(output.exists() for output in find.outputs)  # type: ignore[attr-defined]


def test_run_that_breaks_off_still_suggests(find: Find, capsys: pytest.CaptureFixture[str]) -> None:
    assert find("--from", "1e-5", "--to", "1", "--steps", "51", ends=45) == 0
    out = capsys.readouterr().out
    assert "the run ended at" in out
    assert "suggested: train.lr" in out
    assert find(ends=0) == 1


def test_sweep_that_is_stopped_suggests_nothing(find: Find, capsys: pytest.CaptureFixture[str]) -> None:
    assert find("--from", "1e-5", "--to", "1", "--steps", "51", is_stopped=True) == 1
    said = capsys.readouterr()
    assert "suggested" not in said.out
    assert "the sweep was stopped" in said.err


def test_longest_sweep_is_one_argument(find: Find) -> None:
    assert find("--from", "1.23456e14", "--to", "9.87654e15", "--steps", "5000") == 2, "the valley is below"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "0"], "rates rise from above 0"),
        (["--from", "1", "--to", "0.1"], "rates rise from above 0"),
        (["--to", "nan"], "rates rise from above 0"),
        (["--steps", "3"], "--steps 3: a sweep has at least 10"),
        (["--steps", "5001"], "--steps 5001: a sweep has at most 5,000"),
        (["--set", "adapters={a: {}, b: {}}"], "only train and check take several adapters"),
        (["--plot", "x.doc"], "a picture ends in"),
        (["--set", "train.nothing=1"], "train.nothing"),
    ],
)
def test_mistake_is_one_line(find: Find, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert find(*arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
