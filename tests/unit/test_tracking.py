"""Trackers get the numbers of `metrics.jsonl`; one that is missing is said before anything starts."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from meshlora.run.config.file import read_run
from meshlora.run.run import train
from meshlora.run.together import prepare_run
from meshlora.run.watch.tracking import check_trackers, tracked
from meshlora_ground.errors import UserError
from tests.run_files import metrics_of
from tests.unit.mistakes import Setup

STEPS = 3


class Fake(types.ModuleType):
    """A tracker's module that notes what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def note(*args: Any, **kwargs: Any) -> Fake:
            self.calls.append((name, args, kwargs))
            return self

        return note

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def run(setup: Setup, *trackers: str) -> tuple[Path, list[tuple[dict[str, float], int]]]:
    """(output, numbers and step of each line of `metrics.jsonl`) of a short run on one process."""
    for key, value in {"steps": STEPS, "eval_every": 2, "track": list(trackers)}.items():
        setup.tree["train"][key] = value
    setup.set("topology", "")
    setup.write()
    train({"": prepare_run(read_run(setup.folder / "run.yaml"), world=1)})
    output = setup.folder / "output"
    lines = metrics_of(output)
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 3], "three steps, two evaluations"
    return output, [tracked(line) for line in lines]


def test_names_tell_training_from_evaluation() -> None:
    assert tracked({"step": 4, "loss": 1.5, "tokens": 7}) == ({"train/loss": 1.5, "train/tokens": 7.0}, 4)
    line = {"step": 4, "eval_loss": 2.0, "eval_perplexity": 7.4, "eval_tokens": 9}
    assert tracked(line) == ({"eval/loss": 2.0, "eval/perplexity": 7.4, "eval/tokens": 9.0}, 4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_back_every_number(setup: Setup) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output, expected = run(setup, "tensorboard")
    events = EventAccumulator(str(output / "tensorboard")).Reload()
    found = {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    flat = {(name, step): value for values, step in expected for name, value in values.items()}
    assert found == pytest.approx(flat, rel=1e-6)  # it stores float32


@pytest.mark.parametrize(
    ("name", "log", "close"),
    [("wandb", "log", "finish"), ("mlflow", "log_metrics", "end_run"), ("trackio", "log", "finish")],
)
def test_tracker_is_told_every_number_and_the_end(
    name: str, log: str, close: str, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(name)
    monkeypatch.setitem(sys.modules, name, fake)
    output, expected = run(setup, name)
    assert [(args[0], kwargs["step"]) for args, kwargs in fake.of(log)] == expected
    assert len(fake.of(close)) == 1
    assert fake.calls[-1][0] == close
    if name == "wandb":
        assert fake.of("init")[0][1]["mode"] == "offline"
    if name == "mlflow":
        assert fake.calls[0] == ("set_tracking_uri", (f"sqlite:///{output / 'mlflow.db'}",), {})


def test_missing_tracker_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"'wandb': it is not installed; pip install wandb"):
        check_trackers(["wandb"])


def test_unknown_and_repeated_trackers_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        check_trackers(["tensorbord"])
    with pytest.raises(UserError, match="given twice"):
        check_trackers(["tensorboard", "tensorboard"])
