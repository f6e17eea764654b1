"""A run that loses processes goes on with those that are left, and ends as one process would have."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from tests.one_process import train_alone
from tests.run_files import copy_lines, write_run_file


@pytest.mark.proof
def test_adapter_of_a_run_that_lost_processes_twice_is_that_of_one_process(tmp_path: Path) -> None:
    """dp=4, then what the planner takes for two processes, then tp=2 by name."""
    copy_lines("train", tmp_path / "train.jsonl", 0, 40)
    options = {"steps": 6, "batch_size": 8, "micro_batch_size": 1, "save_every": 2, "on_fewer": "continue"}
    file = write_run_file(
        tmp_path / "run.yaml", model={"dtype": "float64"}, train=options, topology="dp=4", device="cpu"
    )
    output = tmp_path / "run"

    def train(*words: str) -> str:
        command = [sys.executable, "-m", "meshlora", "train", str(file), "--no-preflight", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def back_to(step: int) -> None:
        """As if the run had lost its processes after `step`."""
        shutil.rmtree(output / "adapter")
        for folder in (output / "checkpoints").glob("step-*"):
            if int(folder.name.rpartition("-")[2]) > step:
                shutil.rmtree(folder)

    train("--nproc", "4")
    back_to(2)
    out = train("--nproc", "2", "--resume", "auto")
    assert "2 processes, where topology=dp=4 has 4: the run is on " in out
    assert "goes on after step 2 of dp=4" in out
    back_to(4)
    assert "llama on tp=2: " in train("--nproc", "2", "--resume", "auto", "--set", "topology=tp=2")

    losses = train_alone(file, initial=output / "initial", out=tmp_path / "reference")
    assert largest_loss_gap(read_losses(output / "metrics.jsonl"), losses) < 1e-11
    assert compare_adapters(output / "adapter", tmp_path / "reference").relative < 1e-9
