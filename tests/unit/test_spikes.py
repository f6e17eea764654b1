"""Loss spikes: the rule, a run whose rate jumps, and one that is resumed in between."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshlora.run.checkpoint.manifest import read_whole
from meshlora.run.config.endings import LossSpike
from meshlora.run.config.file import read_run
from meshlora.run.run import train
from meshlora.run.spikes import SpikeWatch, losses_of_steps
from meshlora.run.together import prepare_run
from meshlora_ground.errors import MeshloraError, UserError
from tests.for_each import for_each
from tests.run_files import copy_lines, metrics_of, write_run_file

# A rate of 0.5 in the sixth step throws the adapter far away: losses are high from the seventh on.
PLANTED = {"schedule": "cycle", "cycle": {0: 1e-3, 4: 1e-3, 5: 0.5, 6: 1e-3}, "steps": 12, "batch_size": 2}


def told(options: LossSpike, losses: list[float]) -> list[int]:
    """The steps, from 1, at which patience is at its end; the limit given before each step says the same."""
    watch, found = SpikeWatch(options), list[int]()
    for step, loss in enumerate(losses, 1):
        is_above = math.inf > loss > watch.limit
        assert watch.sees(loss) == is_above
        if is_above:
            found.append(step)
    return found


def test_spikes_in_a_row_are_counted() -> None:
    options = LossSpike(above=2.0, patience=3)
    assert told(options, [1, 3, 3, 1, 3, 3, 3, 1, 3]) == [7]
    assert told(options, [3] * 7) == [3, 6], "patience begins anew"
    assert told(LossSpike(above=2.0, patience=1), [1, 3, 3]) == [2, 3]


def test_the_median_is_of_the_last_losses() -> None:
    flat = [1.0] * 5
    assert told(LossSpike(factor=2.0, patience=1), [*flat, 1.9, 2.1]) == [7]
    assert told(LossSpike(factor=2.0, patience=1), [1.0, 9.0, 9.0]) == [], "too few for a median"
    fell = [10.0] * 8 + [1.0] * 8 + [5.0]
    assert told(LossSpike(factor=2.0, patience=1, window=8), fell) == [17]
    assert told(LossSpike(factor=2.0, patience=1, window=16), fell) == [], "half of them were higher"


def test_one_high_loss_does_not_raise_the_limit() -> None:
    assert told(LossSpike(factor=2.0, patience=1), [1.0] * 9 + [1e6, 2.5]) == [10, 11]


def test_losses_that_are_not_finite_and_those_around_zero_are_none() -> None:
    assert told(LossSpike(above=2.0, patience=2), [3.0, math.nan, math.inf, 3.0]) == [4]
    assert told(LossSpike(factor=2.0, patience=1), [-1.0] * 9 + [5.0]) == []


Run = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run(patience=2)`: trains the planted run, with these options of on_spike; `changes` are of train."""

    def started(resume: str | None = None, changes: dict[str, Any] | None = None, **options: Any) -> None:
        copy_lines("train", tmp_path / "train.jsonl", 0, 8)
        given = PLANTED | {"on_spike": options} | (changes or {})
        file = write_run_file(tmp_path / "out.yaml", train=given, data={"max_length": 16, "train_on": "everything"})
        train({"": prepare_run(read_run(file), world=1, resume=resume)})

    return started


def steps_of(output: Path) -> int:
    return max(line["step"] for line in metrics_of(output))


@pytest.mark.parametrize("options", [{"factor": 1.5}, {"above": 8.0}], ids=str)
def test_planted_spike_ends_the_run(options: dict[str, float], run: Run, tmp_path: Path) -> None:
    output = tmp_path / "out"
    words = {"factor": r"1\.5 times the median of 50 steps before", "above": "8"}[next(iter(options))]
    with pytest.raises(
        MeshloraError, match=rf"^step 8: loss spike: the loss is .*: 2 in a row are above {words}; saved"
    ):
        run(patience=2, **options)
    assert steps_of(output) == 8
    assert not (output / "adapter").exists()
    assert read_whole(output / "checkpoints" / "step-000008").step == 8


def test_checkpoint_before_a_spike_stays(run: Run, tmp_path: Path) -> None:
    with pytest.raises(MeshloraError):
        run(factor=1.5, patience=2, changes={"save_every": 6, "keep_last": 1})
    output = tmp_path / "out"
    assert [read_whole(output / "checkpoints" / f"step-00000{step}").step for step in (6, 8)] == [6, 8]


def test_note_says_it_and_the_run_goes_on(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(factor=1.5, patience=2, then="note")
    assert steps_of(tmp_path / "out") == 12
    said = capsys.readouterr().out
    assert "note: step 8: loss spike: the loss is " in said
    rule = "2 losses in a row above 1.5 times the median of 50 steps before"
    assert f"train.on_spike: a line says so after {rule}" in said


def test_patience_that_is_long_enough_ends_nothing(run: Run, tmp_path: Path) -> None:
    run(factor=1.5, patience=7)
    assert steps_of(tmp_path / "out") == 12


def test_resumed_run_counts_on(run: Run, tmp_path: Path) -> None:
    """It was stopped between two spikes; and one that a spike has ended goes on if that is asked for."""
    output, options = tmp_path / "out", {"factor": 1.5, "patience": 2}
    changes = {"save_every": 7}
    with pytest.raises(MeshloraError, match="step 8"):
        run(changes=changes, **options)
    losses = losses_of_steps(output / "metrics.jsonl", 8)
    shutil.rmtree(output / "checkpoints" / "step-000008")
    with pytest.raises(MeshloraError, match="step 8"):
        run(resume="auto", changes=changes, **options)
    assert losses_of_steps(output / "metrics.jsonl", 8) == losses
    with pytest.raises(MeshloraError, match="step 10"):
        run(resume="auto", changes=changes, **options)
    run(resume="auto", changes=changes)
    assert read_whole(output / "adapter", kinds=("adapter",)).step == 12


@for_each(
    ("options", "said"),
    [
        ({"patience": 2}, "train.on_spike: nothing says what a spike is; give factor, as in factor: 3, or above"),
        ({"above": 5.0, "window": 9}, "train.on_spike.window: it has no effect without factor"),
        ({"factor": 1.0}, "train.on_spike.factor=1.0: it must be above 1"),
        ({"above": 5.0, "then": "skip"}, "train.on_spike.then: 'skip': one of 'note' or 'stop'"),
        ({"above": 5.0, "patience": 0}, "train.on_spike.patience=0: it must be at least 1"),
        ({"treshold": 5.0}, "unknown key"),
    ],
)
def test_mistake_is_said(options: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_run(write_run_file(tmp_path / "run.yaml", train={"on_spike": options}))
    assert said in str(caught.value)
