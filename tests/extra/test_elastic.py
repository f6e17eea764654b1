"""`train.on_fewer`: which topology a run takes on other processes than it asks for. The chain: tests/ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshlora.cli import job
from meshlora.run.config.file import read_runs
from meshlora.run.config.run_file import RunConfig
from meshlora_extra.commands import elastic
from meshlora_extra.commands.elastic import fitted
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology
from tests.run_files import copy_lines, write_run_file


def _configs(folder: Path, **train: Any) -> dict[str, RunConfig]:
    copy_lines("train", folder / "train.jsonl", 0, 8)
    topology = train.pop("topology", "dp=4")
    options = {"on_fewer": "continue", "batch_size": 8, **train}
    data = {"sample_prompts": ["def f():"]} if "sample_every" in train else {}
    return read_runs(write_run_file(folder / "run.yaml", data=data, train=options, topology=topology, device="cpu"))


@pytest.mark.parametrize(
    ("topology", "on_fewer", "world"), [("dp=4", "stop", 2), ("dp=4", "continue", 4), ("tp=2", "continue", 6)]
)
def test_run_that_fits_or_asks_for_nothing_else_stays_as_it_is(
    topology: str, on_fewer: str, world: int, tmp_path: Path
) -> None:
    configs = _configs(tmp_path, topology=topology, on_fewer=on_fewer)
    assert job.fitted(configs, world=world) == (configs, ())


def test_planner_chooses_what_fits(tmp_path: Path) -> None:
    configs, (note,) = fitted(_configs(tmp_path), world=2)
    config = configs[""]
    assert Topology.parse(config.topology).world == 2
    assert config.train.batch_size == 8
    assert f"2 processes, where topology=dp=4 has 4: the run is on {config.topology}" in note


def test_best_that_training_refuses_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner knows no samples, which stages that take turns have none of."""
    order = [Topology.parse(text) for text in ("pp=2,interleave=2", "tp=2", "dp=2")]
    monkeypatch.setattr(elastic, "_ranked", lambda *_: iter(order))
    configs, _ = fitted(_configs(tmp_path, sample_every=2), world=2)
    assert configs[""].topology == "tp=2"
    monkeypatch.setattr(elastic, "_ranked", lambda *_: iter(order[:1]))
    with pytest.raises(UserError, match="no topology of as many fits this run"):
        fitted(_configs(tmp_path, sample_every=2), world=2)


def test_mistake_in_a_topology_is_no_reason_for_another(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'tq' is not an axis"):
        fitted(_configs(tmp_path, topology="tq=4"), world=2)


def test_the_name_of_a_gpu_is_read_without_opening_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0000:00:06.0").mkdir()
    (tmp_path / "0000:00:06.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 11\n")
    monkeypatch.setattr(elastic, "_DRIVER", tmp_path)
    monkeypatch.setattr(elastic, "on_gpus", lambda device, num_ranks: True)
    assert elastic._gpu_of(_configs(tmp_path)[""]).name == "h200"
