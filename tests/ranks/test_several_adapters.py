"""Several adapters in one run: each is the adapter of its own single run, on every topology, and faults show."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from meshlora.adapter.formats.peft_format import WEIGHTS_FILE
from meshlora.run import run, trainer
from meshlora.run.config.file import read_runs
from meshlora.run.run import train
from meshlora.run.together import prepare_run, prepare_runs
from meshlora_ground.errors import MeshloraError
from meshlora_judge.compare import compare_adapters
from tests.pool import Pool, wait_for_all
from tests.ranks.test_trainer import small_base
from tests.run_files import copy_lines, untimed_metrics_of, write_run_file

LIMIT = 1e-11  # of a relative difference; the issue asks for 1e-6, rounding gives 1e-14
WORLD = {"": 1, "dp=2": 2, "tp=2": 2, "tp=2,sp": 2}
# Of all adapters, here and there: it changes nothing.
CHANGES: dict[str, dict[str, Any]] = {"": {"micro_batch_size": 3}, "tp=2,sp": {"recompute": "full"}}

# All that adapters can differ in. The batch sizes are not multiples of each other, of dp or of a micro-batch.
ADAPTERS: dict[str, dict[str, Any]] = {
    "first": {
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.2},
        "data": {"train": "first.jsonl", "eval": "eval.jsonl"},
        "train": {"steps": 4, "batch_size": 5, "lr": 5e-3, "warmup_steps": 2, "seed": 1, "eval_every": 2},
    },
    "second": {
        "lora": {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.1},
        "data": {"train": "second.jsonl", "max_length": 64, "train_on": "everything"},
        "train": {
            "steps": 5,
            "batch_size": 3,
            "lr": 2e-3,
            "schedule": "cosine",
            "max_grad_norm": 0.05,
            "save_every": 2,
        },
    },
    "third": {
        "lora": {"r": 2, "lora_alpha": 8, "use_rslora": True, "target_modules": ["o_proj", "up_proj"]},
        "data": {"train": "third.jsonl"},
        "train": {"steps": 2, "batch_size": 2, "lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.0, "seed": 7},
    },
}
LINES = {"first": (0, 13), "second": (20, 29), "third": (40, 47), "eval": (60, 63)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many")
    for name, (start, stop) in LINES.items():
        copy_lines("train", path / f"{name}.jsonl", start, stop)
    return path


def _file(folder: Path, name: str, topology: str, **changes: Any) -> Path:
    """A run file whose output is the folder `name`; changes: of `train`, for all adapters."""
    adapters = json.loads(json.dumps(ADAPTERS))
    for own in adapters.values():
        for key in {"train", "eval"} & own["data"].keys():
            own["data"][key] = str(folder / own["data"][key])
    common: dict[str, Any] = {"steps": 9, "save_every": 1, "micro_batch_size": 4, "max_grad_norm": 0.1}
    common["objective"] = {"kind": "sft", "label_smoothing": 0.1}
    return write_run_file(
        folder / f"{name}.yaml",
        model={"path": str(small_base()), "dtype": "float64"},
        data={"max_length": 128},
        train=common | changes,
        lora=None,
        adapters=adapters,
        topology=topology,
    )


def _train(file: Path, world: int, resume: str | None = None) -> None:
    run.leave = lambda: None  # type: ignore[assignment]  # the pool needs its groups for the next test
    runs = prepare_runs(read_runs(file), world=world, resume=resume)
    if world > 1:
        wait_for_all(world)
    train(runs)


@pytest.fixture(scope="module")
def singles(folder: Path) -> Path:
    """The output of three runs of one adapter each, on one process."""
    for config in read_runs(_file(folder, "singles", "")).values():
        train({"": prepare_run(config, world=1)})
    return folder / "singles"


def _together(folder: Path, topology: str, pools: Callable[[int], Pool]) -> Path:
    """The output of the run of all, made once."""
    name, world = f"many-{topology}", WORLD[topology]
    if not (folder / name).exists():
        file = _file(folder, name, topology, **CHANGES.get(topology, {}))
        if world == 1:
            _train(file, 1)
        else:
            pools(world).run(_train, file, world)
    return folder / name


@pytest.mark.long
@pytest.mark.parametrize(
    "topology", ["", *(pytest.param(t, marks=pytest.mark.proof) for t in ("dp=2", "tp=2")), "tp=2,sp"]
)
def test_each_of_many_is_the_adapter_of_its_single_run(
    topology: str, folder: Path, singles: Path, pools: Callable[[int], Pool]
) -> None:
    output = _together(folder, topology, pools)
    for adapter in ADAPTERS:
        ours, alone = output / adapter, singles / adapter
        assert compare_adapters(ours / "adapter", alone / "adapter").relative < LIMIT
        for step, expected in zip(untimed_metrics_of(ours), untimed_metrics_of(alone), strict=True):
            assert step == pytest.approx(expected, rel=LIMIT)
        assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in alone.iterdir())


@pytest.mark.long
def test_each_of_many_on_a_quantised_base_is_that_of_its_single_run(
    folder: Path, singles: Path, pools: Callable[[int], Pool]
) -> None:
    """Of other weights than the others, or it was not quantised."""
    alone, together = (_file(folder, f"nf4-{name}", "") for name in ("alone", "together"))
    for file, topology in ((alone, ""), (together, "dp=2,dp_shard")):
        tree = yaml.safe_load(file.read_text())
        tree["model"]["quantization"], tree["topology"] = "nf4", topology
        file.write_text(yaml.safe_dump(tree))
    for config in read_runs(alone).values():
        train({"": prepare_run(config, world=1)})
    pools(2).run(_train, together, 2)
    assert max(_gaps(folder / "nf4-together", folder / "nf4-alone").values()) < LIMIT
    assert min(_gaps(folder / "nf4-alone", singles).values()) > 1e-3


def _gaps(ours: Path, alone: Path) -> dict[str, float]:
    return {name: compare_adapters(ours / name / "adapter", alone / name / "adapter").relative for name in ADAPTERS}


def test_each_of_many_goes_on_from_its_own_last_checkpoint(
    folder: Path, singles: Path, pools: Callable[[int], Pool]
) -> None:
    """One is done, one stopped after step 2, one after step 4: they meet at steps that they never had together."""
    shutil.copytree(_together(folder, "", pools), folder / "stopped", symlinks=True)
    for adapter in ("first", "second"):
        shutil.rmtree(folder / "stopped" / adapter / "adapter")
    shutil.rmtree(folder / "stopped" / "first" / "checkpoints" / "step-000003")
    before = (folder / "stopped" / "third" / "adapter" / WEIGHTS_FILE).stat().st_mtime_ns
    _train(_file(folder, "stopped", ""), 1, "auto")
    assert max(_gaps(folder / "stopped", singles).values()) < LIMIT
    assert (folder / "stopped" / "third" / "adapter" / WEIGHTS_FILE).stat().st_mtime_ns == before
    for adapter in ADAPTERS:
        steps = [line["step"] for line in untimed_metrics_of(folder / "stopped" / adapter) if "loss" in line]
        assert steps == list(range(1, ADAPTERS[adapter]["train"]["steps"] + 1))


@pytest.mark.long
def test_step_of_one_that_is_not_finite_is_left_out_and_the_others_go_on(
    folder: Path, singles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = trainer.StepSums.read

    def broken(self: Any, totals: torch.Tensor, norms: torch.Tensor, **rest: Any) -> Any:
        place = self._names.index("second") if "second" in self._names else None
        norms = norms.clone()
        norms[slice(0) if place is None else place] = math.inf
        return read(self, totals, norms, **rest)

    monkeypatch.setattr(trainer.StepSums, "read", broken)
    _train(_file(folder, "skipped", "", on_nonfinite="skip"), 1)
    gaps = _gaps(folder / "skipped", singles)
    assert max(gaps["first"], gaps["third"]) < LIMIT
    initial, final = (folder / "skipped" / "second" / name / WEIGHTS_FILE for name in ("initial", "adapter"))
    assert initial.read_bytes() == final.read_bytes()
    assert all(line["skipped"] for line in untimed_metrics_of(folder / "skipped" / "second") if "loss" in line)
    with pytest.raises(MeshloraError, match="adapter second, step 1: the gradient norm is inf"):
        _train(_file(folder, "ended", ""), 1)
