"""Calibration on real ranks: which samples they take together, and what a run says of the plan that follows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from meshlora.cli.main import main
from meshlora.comm.groups import join, open_mesh
from meshlora_extra.planner.calibrate import Timing, calibrate, clock_of
from meshlora_ground.topology import Topology
from tests.extra.test_calibrate import HOST_S, clock
from tests.pool import Pool


def _calibrated(topology: str) -> tuple[dict[str, Any], dict[tuple[str, int, bool], int], list[float]]:
    """(fields, how many messages over which axis, what a sample took on this rank's clock)."""
    mesh = open_mesh(Topology.parse(topology), device=join("cpu"))
    fields, timings = calibrate(mesh, [torch.float32], clock=clock)
    messages = Counter((t.axis, t.ranks, t.is_network) for t in timings if t.what == "message")
    slowest = clock_of(mesh)(Timing("message"), lambda: torch.ones(10_000 * (1 + 50 * mesh.rank)).sum())
    return fields, dict(messages), [slowest]


@pytest.mark.long
def test_ranks_measure_every_axis_and_agree(pools: Callable[[int], Pool]) -> None:
    """Each of four collectives at five sizes, over each axis with several ranks; a number is that of the slowest."""
    found = pools(4).run(_calibrated, "dp=2,tp=2,sp")
    fields, messages, slowest = found[0]
    assert messages == {("dp", 2, False): 20, ("tp", 2, False): 20}
    assert (fields["ranks"], fields["nodes"], fields["gpus_per_node"]) == (4, 1, 4)
    assert fields["host_s"] == pytest.approx(HOST_S)
    assert fields["node_gb_s"] == pytest.approx(2.5)
    assert "network_gb_s" not in fields
    assert "half_products" not in fields
    assert all(other == found[0] for other in found)
    assert len(slowest) == 1


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    base = Path(__file__).parents[2] / "examples"
    values = {
        "model": {"path": str(base / "tiny_base"), "dtype": "float32"},
        "lora": {"r": 4, "target_modules": "all-linear"},
        "data": {"train": str(base / "docstrings" / "eval.jsonl"), "max_length": 128},
        "train": {"output": str(tmp_path / "out"), "steps": 3, "batch_size": 2, "micro_batch_size": 2},
        "device": "cpu",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "run.yaml"


def _hardware(folder: Path, **changed: Any) -> str:
    values = {"name": "known", "device": "cpu", "memory_gb": 8, "memory_gb_s": 20, "full_tflops": 0.1, "host_s": 0.001}
    (folder / "hardware.json").write_text(json.dumps(values | changed))
    return str(folder / "hardware.json")


def test_a_run_says_and_writes_what_was_planned(run_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The plan of the very run: of its rows, micro-batch and topology, by the planner's own command."""
    folder, file = run_file.parent, _hardware(run_file.parent)
    assert main(["train", str(run_file), "--no-preflight", "--hardware", file]) == 0
    said = capfd.readouterr().out
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    [planned_s] = {line["planned_step_time_s"] for line in lines if "loss" in line}
    found = re.search(r"planned (\S+) s a step \(rows of (\d+) tokens on 1 x known\)", said)
    assert found is not None, said
    assert float(found[1]) == pytest.approx(planned_s, rel=1e-2)
    assert 32 < int(found[2]) < 128  # as long as they are, not as long as they may be
    assert "x the plan (compute" in said
    model, lora = str(Path(__file__).parents[2] / "examples" / "tiny_base"), folder / "lora.yaml"
    lora.write_text("{r: 4, target_modules: all-linear}")
    words = ["--gpus", "1", "--seq", found[2], "--global-batch", "2", "--micro-batch", "2", "--recompute", "none"]
    rest = ["--lora", str(lora), "--dtype", "float32", "--topology", "dp=1", "--json", str(folder / "plan.json")]
    assert main(["plan", "--model", model, "--hardware", file, *words, *rest]) == 0
    [plan] = json.loads((folder / "plan.json").read_text())["topologies"]
    assert plan["time_s"] == pytest.approx(planned_s)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        pytest.param({"device": "cuda"}, "it is of cuda, and this run is on cpu; calibrate here", id="other_device"),
        pytest.param({"memory_gb_s": 0}, "it must be a number above 0", id="no_bandwidth"),
    ],
)
def test_wrong_file_ends_a_run_before_its_first_step(
    changed: dict[str, Any], words: str, run_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = _hardware(run_file.parent, **changed)
    assert main(["train", str(run_file), "--no-preflight", "--nproc", "1", "--hardware", file]) == 2
    assert words in capfd.readouterr().err
    assert not (run_file.parent / "out").exists()
