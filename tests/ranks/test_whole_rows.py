"""`data.packing: rows` on meshes: the adapter of one process, whose steps count the same rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from meshlora_ground.errors import UnsupportedError
from meshlora_judge.compare import compare_adapters
from tests.one_process import train_alone
from tests.pool import Pool
from tests.ranks.test_trainer import run_and_keep_groups, small_base
from tests.run_files import metrics_of, write_run_file

# Of unequal lengths: the rows of a step are cut at sequences, whose positions and attention begin anew.
ROWS = [{"prompt": f"def f{n}(", "completion": f"x): return {'x + ' * (n % 5)}{n}"} for n in range(14)]


def _file(folder: Path, name: str, topology: str) -> Path:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return write_run_file(
        folder / f"{name}.yaml",
        model={"path": str(small_base()), "dtype": "float64"},
        lora={"r": 4, "target_modules": "all-linear"},
        data={"packing": "rows", "max_length": 64},
        train={"epochs": 2, "steps": None, "batch_size": 2, "micro_batch_size": 1, "lr": 1e-2, "seed": 3},
        topology=topology,
    )


@pytest.mark.parametrize("topology", ["dp=2", "tp=2,sp"])
def test_rows_made_up_front_train_the_adapter_of_one_process(
    topology: str, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    run_and_keep_groups(_file(tmp_path, "one", ""), 1)
    pools(2).run(run_and_keep_groups, _file(tmp_path, "two", topology), 2)
    losses = [[line["loss"] for line in metrics_of(tmp_path / name) if "loss" in line] for name in ("one", "two")]
    assert len(losses[0]) > 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    found = compare_adapters(tmp_path / "one" / "adapter", tmp_path / "two" / "adapter")
    assert found.relative < 1e-6, found  # files are float32


def test_reference_takes_all_sequences_of_the_rows_of_a_step(tmp_path: Path) -> None:
    file = _file(tmp_path, "own", "")
    run_and_keep_groups(file, 1)
    losses = train_alone(file, initial=tmp_path / "own" / "initial", out=tmp_path / "alone")
    assert [line["loss"] for line in metrics_of(tmp_path / "own") if "loss" in line] == pytest.approx(losses, rel=1e-12)
    found = compare_adapters(tmp_path / "own" / "adapter", tmp_path / "alone")
    assert found.relative < 1e-6, found  # files are float32


def test_reference_of_another_order_is_refused(tmp_path: Path) -> None:
    """Of which it would be silently wrong."""
    file = _file(tmp_path, "own", "")
    tree = yaml.safe_load(file.read_text())
    sources = [{"path": tree["data"]["train"], "weight": weight} for weight in (1, 2)]
    for given, changed in {
        r"data\.shuffle=false": {"shuffle": False},
        r"sources of data\.train with weights": {"train": sources, "packing": False},
    }.items():
        file.write_text(yaml.safe_dump(tree | {"data": tree["data"] | changed}))
        with pytest.raises(UnsupportedError, match=f"{given} in reference_run: the reference draws its own order"):
            train_alone(file, initial=tmp_path, out=tmp_path / "alone")
