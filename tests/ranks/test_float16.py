"""A float16 run trains with a loss scale that all ranks share, and goes on from a checkpoint to the same bits."""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import meshlora.run.run as run_module
from meshlora.adapter.attach import active_factors, runtime
from meshlora.adapter.formats.peft_format import WEIGHTS_FILE
from meshlora.run.checkpoint.manifest import read_whole
from meshlora.run.config.file import read_run
from meshlora.run.loss_scale import LossScale
from meshlora.run.run import train
from meshlora.run.together import prepare_run
from meshlora.run.trained import TrainedAdapter
from meshlora.run.trainer import Trainer
from meshlora_ground.errors import MeshloraError
from meshlora_judge.compare import compare_adapters
from tests.pool import Pool, wait_for_all
from tests.ranks.test_trainer import folder, run_and_keep_groups, run_file
from tests.run_files import untimed_metrics_of

__all__ = ["folder"]  # a fixture
STEPS, STOPPED = 6, 2


def _file(folder: Path, name: str, topology: str, dtype: str = "float16", **changes: Any) -> Path:
    options = {"train__steps": STEPS, "train__lr": 1e-3, "train__eval_every": 0, **changes}
    return run_file(folder, name, topology, model__dtype=dtype, **options)


@pytest.fixture(scope="module")
def whole(folder: Path, pools: Callable[[int], Pool]) -> Path:
    pools(2).run(run_and_keep_groups, _file(folder, "half", "tp=2,sp"), 2, timeout_s=120)
    return folder / "half"


def _train(file: Path, scale: float) -> None:
    """A run whose loss scale begins with `scale`."""
    with _begins_with(scale):
        run_and_keep_groups(file, 2)


def _begins_with(scale: float) -> Any:
    return mock.patch("meshlora.run.trained.LossScale", functools.partial(LossScale, scale))


@pytest.mark.long
def test_float16_trains_as_float32_does(folder: Path, pools: Callable[[int], Pool]) -> None:
    """From a scale at which nothing overflows; with clipping, which acts on the unscaled gradient."""
    pools(2).run(_train, _file(folder, "half-small", "tp=2,sp", train__steps=3), 256.0, timeout_s=120)
    pools(2).run(run_and_keep_groups, _file(folder, "single", "tp=2,sp", "float32", train__steps=3), 2, timeout_s=120)
    ours, theirs = ([m for m in untimed_metrics_of(folder / n) if "loss" in m] for n in ("half-small", "single"))
    assert ours[-1]["loss_scale"] == 256.0
    assert not any("skipped" in line for line in ours)
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)
    assert compare_adapters(folder / "half-small" / "adapter", folder / "single" / "adapter").relative < 0.1


@pytest.mark.long
def test_scale_that_is_too_large_falls_until_steps_are_taken(whole: Path) -> None:
    steps = [line for line in untimed_metrics_of(whole) if "loss" in line]
    skipped = list(itertools.accumulate(line.get("skipped", False) for line in steps))
    assert skipped[0] == 1, "a sum over tokens times 2^16 is beyond float16"
    assert skipped[-1] < STEPS
    assert [line["loss_scale"] for line in steps] == [2.0 ** (16 - number) for number in skipped]
    assert [line["lr"] for line in steps] == pytest.approx([5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4]), "of the step"


@pytest.mark.long
def test_resumed_run_has_the_same_bits_and_scale(folder: Path, whole: Path, pools: Callable[[int], Pool]) -> None:
    output = folder / "half-again"
    shutil.copytree(whole, output)
    shutil.rmtree(output / "adapter")
    shutil.rmtree(output / "checkpoints" / "step-000004")
    stored = read_whole(output / "checkpoints" / f"step-{STOPPED:06d}").loss_scale
    assert stored == {"scale": 2.0**14, "good_steps": 0, "skipped": 2}
    pools(2).run(run_and_keep_groups, _file(folder, output.name, "tp=2,sp"), 2, "auto", timeout_s=120)
    assert (output / "adapter" / WEIGHTS_FILE).read_bytes() == (whole / "adapter" / WEIGHTS_FILE).read_bytes()
    assert untimed_metrics_of(output) == untimed_metrics_of(whole)


def _one_overflow(file: Path) -> dict[str, Any]:
    """A run in which, in step 2, what rank 1 alone holds has a gradient that is not finite."""
    backward, seen = Trainer._backward, []

    def overflowing(self: Trainer, *args: Any, **options: Any) -> Any:
        result = backward(self, *args, **options)
        if seen[-1] == 1 and runtime(self.model).mesh.rank == 1:
            own = next(f for f in active_factors(self.model) if f.rule.split_dim is not None)
            assert own.parameter.grad is not None
            own.parameter.grad.view(-1)[0] = math.inf
        return result

    step, states = Trainer.train_step, []

    def watched(self: Trainer, adapters: list[TrainedAdapter]) -> Any:
        (one,) = adapters
        seen.append(one.done)
        (metrics,) = step(self, adapters)
        values: dict[str, Tensor] = {f.name: f.parameter.detach().clone() for f in active_factors(self.model)}
        moments = [s["exp_avg"].clone() for s in one.optimizer.state.values()]
        states.append((values, moments, metrics.skipped, metrics.loss_scale))
        return [metrics]

    with (
        mock.patch.object(run_module, "leave"),
        mock.patch.object(Trainer, "_backward", overflowing),
        mock.patch.object(Trainer, "train_step", watched),
        _begins_with(16.0),
    ):
        run = prepare_run(read_run(file), world=2)
        wait_for_all(2)  # the ranks of a pool have met already: one could make the output before the other looks
        train({"": run})
    return {"states": states}


def test_overflow_on_one_rank_skips_the_step_on_all(folder: Path, pools: Callable[[int], Pool]) -> None:
    file = _file(folder, "overflow", "tp=2", train__save_every=0, train__batch_size=2, train__steps=3)
    for found in pools(2).run(_one_overflow, file, timeout_s=120):
        (first, moments, *_), (second, same_moments, skipped, scale), (third, _, still, _) = found["states"]
        assert (skipped, scale, still) == (True, 8.0, False)
        assert all(torch.equal(first[name], second[name]) for name in first), "no rank takes the step"
        assert all(map(torch.equal, moments, same_moments))
        assert any(not torch.equal(second[name], third[name]) for name in second), "the next one is taken"
    norms = [line.get("grad_norm") for line in untimed_metrics_of(folder / "overflow") if "loss" in line]
    assert [norm is None for norm in norms] == [False, True, False], "infinity is not JSON"


# --- the scale by itself


def test_scale_follows_the_rules_of_grad_scaler() -> None:
    ours = LossScale(1024.0, interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for step, is_finite in enumerate([1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]):
        theirs.scale(torch.ones(1))
        parameter.grad = torch.full((1,), 1.0 if is_finite else math.nan)
        theirs.step(optimizer)
        theirs.update()
        assert ours.takes_step(float(parameter.grad), step=step) == bool(is_finite)
        assert ours.scale == theirs.get_scale()
        assert ours.good_steps == theirs.state_dict()["_growth_tracker"]
    assert ours.skipped == 3
    assert ours.good_steps == 1, "not what a new one has"
    again = LossScale()
    again.restore(json.loads(json.dumps(ours.state())))
    assert again.state() == ours.state()


def test_gradient_that_is_never_finite_ends_the_run() -> None:
    scale = LossScale()
    for step in range(30):
        assert not scale.takes_step(math.nan, step=step)
    with pytest.raises(MeshloraError, match="step 31: the gradient norm is nan at every loss scale"):
        scale.takes_step(math.nan, step=30)
