"""Trackers: the numbers of `metrics.jsonl` for tensorboard, wandb, mlflow or trackio too, where one is installed.

Owns: which there are, what each is told, and that none of them talks to a server by itself. Does not own: the numbers
(`train.trainer`), when they are written (`train.watch.metrics`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from meshlora.common.errors import UserError, did_you_mean

PROJECT = "meshlora"


class Tracker(Protocol):
    """What gets the numbers of a run, on rank 0."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers of optimizer step `step`, by names as in `train/loss` and `eval/loss`."""

    def close(self) -> None:
        """The run is over, or has failed."""


class _Tensorboard:
    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier start recorded of later steps is hidden.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Offline: `wandb sync` sends it."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=PROJECT, name=folder.name, dir=str(folder), config=dict(config), mode="offline", reinit=True
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """Into a folder beside the run."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        self._mlflow.set_experiment(PROJECT)
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_dict(dict(config), "run.json")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics({name: float(value) for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class _Trackio:
    """In trackio's own store on this machine."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._trackio.init(project=PROJECT, name=folder.name, config=dict(config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


_TRACKERS: Mapping[str, Callable[[Path, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": _Tensorboard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "trackio": _Trackio,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raises: UserError for a tracker that is not known, or not installed."""
    for name in names:
        if name not in _TRACKERS:
            raise UserError(f"train.track: {name!r}", "there is no such tracker", did_you_mean(name, _TRACKERS))
        if names.count(name) > 1:
            raise UserError(f"train.track: {name!r}", "it is given twice", "give it once")
        if importlib.util.find_spec(name) is None:
            raise UserError(f"train.track: {name!r}", "it is not installed", f"pip install {name}")


def open_trackers(names: Sequence[str], folder: Path, *, config: Mapping[str, Any], done: int) -> list[Tracker]:
    """Those of a run in `folder`, which goes on after `done` steps. config: the run file's values."""
    return [_TRACKERS[name](folder, config, done) for name in names]


def tracked(values: Mapping[str, object]) -> tuple[dict[str, float], int]:
    """(numbers by trackers' names, step) of a line of `metrics.jsonl`."""
    numbers = {name: value for name, value in values.items() if name != "step" and isinstance(value, int | float)}
    named = {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": float(value)
        for name, value in numbers.items()
    }
    step = values["step"]
    assert isinstance(step, int)
    return named, step
