"""Trackers: the numbers of `metrics.jsonl`, sent to tensorboard, wandb, mlflow or trackio.

Owns: the supported trackers, their options, and that none of them contacts a server by itself. Does not own: the
numbers (`run.trainer`), when they are written (`run.watch.metrics`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshlora_ground.errors import UserError, did_you_mean

PROJECT = "meshlora"


@dataclass(frozen=True)
class Tracker:
    """A sink for the numbers of a run, on rank 0.

    log: called with numbers of an optimizer step, named as `train/loss` and `eval/loss`, and the step. close: called
    when the run ends or fails.
    """

    log: Callable[[Mapping[str, float], int], object]
    close: Callable[[], object]


def _tensorboard(folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # Hide what an earlier start recorded of later steps.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def _wandb(folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    """Offline; `wandb sync` uploads it."""
    wandb: Any = importlib.import_module("wandb")
    run = wandb.init(
        project=PROJECT, name=folder.name, dir=str(folder), config=dict(config), mode="offline", reinit=True
    )
    return Tracker(lambda values, step: run.log(values, step=step), run.finish)


def _mlflow(folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    """In a database in the folder of the run."""
    mlflow: Any = importlib.import_module("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
    mlflow.set_experiment(PROJECT)
    mlflow.start_run(run_name=folder.name)
    mlflow.log_dict(dict(config), "run.json")
    return Tracker(lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run)


def _trackio(folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    """In trackio's own store on this machine."""
    trackio: Any = importlib.import_module("trackio")
    trackio.init(project=PROJECT, name=folder.name, config=dict(config))
    return Tracker(lambda values, step: trackio.log(values, step=step), trackio.finish)


_TRACKERS: Mapping[str, Callable[[Path, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raises: UserError for an unknown, repeated or missing tracker."""
    for name in names:
        if name not in _TRACKERS:
            raise UserError(f"train.track: {name!r}", "there is no such tracker", did_you_mean(name, _TRACKERS))
        if names.count(name) > 1:
            raise UserError(f"train.track: {name!r}", "it is given twice", "give it once")
        if importlib.util.find_spec(name) is None:
            raise UserError(f"train.track: {name!r}", "it is not installed", f"pip install {name}")


def open_trackers(names: Sequence[str], folder: Path, *, config: Mapping[str, Any], done: int) -> list[Tracker]:
    """Open the trackers `names` of a run in `folder` after `done` steps. config: the run file's values."""
    return [_TRACKERS[name](folder, config, done) for name in names]


def tracked(values: Mapping[str, object]) -> tuple[dict[str, float], int]:
    """(numbers under the names for trackers, step) of a line of `metrics.jsonl`."""
    named, step = dict[str, float](), values["step"]
    for name, value in values.items():
        if name in ("step", "steps") or not isinstance(value, int | float):
            continue
        if name.startswith("eval_"):
            named[f"eval/{name.removeprefix('eval_')}"] = float(value)
        else:
            named[f"train/{name}"] = float(value)
    assert isinstance(step, int)
    return named, step
