"""A failing rank ends all ranks, with its cause shown once; what it leaves on disk is whole.

Real launches. Faults come from a `sitecustomize.py` on PYTHONPATH, which every rank imports before anything else: the
product has no code for being tested.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from meshlora.plan.twin import twin_config

TOKENIZER = Path(__file__).parents[2] / "examples" / "tiny_base"
# From the fault to the end of every process.
PATIENCE_S = 30.0
# What is tested here comes after the preflight, which takes longer than all of it.
TRAIN = ("-m", "meshlora", "train", "run.yaml", "--nproc", "2", "--no-preflight")

# What torch and its backends say on a rank whose peer is gone.
NOISE = ("Connection closed by peer", "lost contact", "connectFullMesh", "ProcessGroup", "ChildFailedError", "elastic")

FAULTS = '''
import os, signal, time
from pathlib import Path

here = Path(__file__).parent
if "RANK" in os.environ:
    rank = int(os.environ["RANK"])
    (here / f"pid-{rank}").write_text(str(os.getpid()))
    from meshlora.train import trainer

    def at(step, on_rank, fault):
        """Call `fault` in the middle of `step` (from 1) of rank `on_rank`: after its loss, before its backward."""
        if rank != on_rank:
            return
        train_step, loss_sum, now = trainer.Trainer.train_step, trainer.Trainer._loss_sum, [0]

        def noticed_step(self, index):
            now[0] = index + 1
            return train_step(self, index)

        def faulty_loss(self, batch, base):
            loss, sums = loss_sum(self, batch, base)
            if now[0] != step:
                return loss, sums
            (here / "fault-at").write_text(str(time.time()))
            return fault(loss), sums

        trainer.Trainer.train_step, trainer.Trainer._loss_sum = noticed_step, faulty_loss

    def die(_=None):
        os.kill(os.getpid(), signal.SIGKILL)
'''


@dataclass
class Job:
    """A run file in a folder of its own, and how to start it."""

    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def write(self, fault: str = "", **train: object) -> None:
        lines = "".join(json.dumps({"prompt": f"f_{i}():", "completion": f" return {i}"}) + "\n" for i in range(8))
        (self.folder / "train.jsonl").write_text(lines)
        (self.folder / "faults").mkdir()
        (self.folder / "faults" / "sitecustomize.py").write_text(FAULTS + fault)
        tree = {
            "model": {"path": str(self.folder.parent / "model")},
            "data": {"train": "train.jsonl", "max_length": 32, "cache_dir": "cache"},
            "train": {"output": "output", "steps": 5, "batch_size": 2, "log_every": 1, **train},
            "lora": {"r": 2, "target_modules": ["q_proj", "down_proj"]},
            "topology": "tp=2",
            "device": "cpu",
        }
        (self.folder / "run.yaml").write_text(yaml.safe_dump(tree))

    def start(self, *command: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(self.folder / "faults"), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, *(command or TRAIN)],
            cwd=self.folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *command: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr), once all has ended, in time after the fault where there was one."""
        process = self.start(*command)
        out, err = process.communicate(timeout=120)
        fault_at = self.folder / "faults" / "fault-at"
        if fault_at.exists():
            assert time.time() - float(fault_at.read_text()) < PATIENCE_S
        assert self.living_ranks() == []
        return process.returncode, out, err

    def started_ranks(self) -> list[int]:
        return sorted(int(file.read_text()) for file in (self.folder / "faults").glob("pid-*"))

    def living_ranks(self) -> list[int]:
        return [pid for pid in self.started_ranks() if Path(f"/proc/{pid}").exists()]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(twin_config("llama", vocab_size=2048), dtype=torch.float32)
    model.save_pretrained(folder / "model")
    for file in TOKENIZER.glob("*token*.json"):
        shutil.copy(file, folder / "model")
    return folder


@pytest.fixture
def job(base: Path, request: pytest.FixtureRequest) -> Job:
    folder = base / request.node.name
    folder.mkdir()
    return Job(folder)


def test_cause_of_the_rank_that_raised_is_shown_first_and_once(job: Job) -> None:
    job.write(
        """
    def fault(loss):
        raise ZeroDivisionError("the cause")
    at(2, 1, fault)
"""
    )
    code, _, err = job.run()
    assert code == 1
    assert err.startswith("error: rank 1: Traceback")
    assert err.count("ZeroDivisionError: the cause") == 1
    assert err.count("Traceback") == 1
    assert not [noise for noise in NOISE if noise in err], err
    assert not (job.output / "adapter").exists()


def test_rank_killed_in_the_middle_of_a_save_is_named_and_leaves_whole_adapters(job: Job) -> None:
    job.write(
        """
    from meshlora.adapter import peft_format
    save_file, calls = peft_format.save_file, []

    def killed_half_way(tensors, file, metadata):
        save_file(tensors, file, metadata=metadata)
        calls.append(file)
        if len(calls) == 4:  # initial, step 1, step 2, and now step 3
            file.write_bytes(file.read_bytes()[:100])
            (here / "fault-at").write_text(str(time.time()))
            die()

    if rank == 0:
        peft_format.save_file = killed_half_way
""",
        save_every=1,
    )
    code, _, err = job.run()
    assert code == 1
    assert err.splitlines() == ["error: rank 0 was ended by signal 9 (SIGKILL)"]
    assert not (job.output / "adapter").exists()
    saved = sorted((job.output / "checkpoints").glob("step-*"))
    assert [folder.name for folder in saved] == ["step-000001", "step-000002"]
    for folder in [job.output / "initial", *saved]:
        model = AutoModelForCausalLM.from_pretrained(job.folder.parent / "model")
        PeftModel.from_pretrained(model, folder)


def test_user_mistake_starts_no_rank(job: Job) -> None:
    job.write(warmup_steps=9)
    code, out, err = job.run()
    assert (code, out) == (2, "")
    assert err.splitlines() == ["error: train.warmup_steps=9: it must be below the 5 steps of the run"]
    assert job.started_ranks() == []
    assert not job.output.exists()


def test_user_mistake_under_torchrun_is_said_once(job: Job) -> None:
    job.write(warmup_steps=9)
    code, _, err = job.run(
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "meshlora", "train", "run.yaml")
    )
    assert code != 0
    assert err.count("error: train.warmup_steps=9: it must be below the 5 steps of the run") == 1
    assert err.startswith("error: ")  # then torchrun's own report, which ends with the same words
    assert not job.output.exists()


def test_interrupt_ends_all_ranks(job: Job) -> None:
    job.write(steps=1_000_000)
    process = job.start()
    _wait_until(lambda: (job.output / "metrics.jsonl").exists() and (job.output / "metrics.jsonl").stat().st_size > 0)
    started = time.monotonic()
    assert len(job.living_ranks()) == 2
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S
    assert process.returncode == 130
    assert err.splitlines() == ["interrupted"]
    assert job.living_ranks() == []
    assert not (job.output / "adapter").exists()


def test_loss_that_is_not_finite_stops_the_run(job: Job) -> None:
    job.write("\n    for each in (0, 1):\n        at(3, each, lambda loss: loss * float('nan'))\n")
    code, _, err = job.run()
    assert code == 1
    assert err.count("error:") == 1
    assert "step 3: the loss is nan: in sequences " in err
    assert "first the loss itself, of finite outputs; lower train.lr" in err
    assert "Traceback" not in err
    assert not (job.output / "adapter").exists()
    assert len((job.output / "metrics.jsonl").read_text().splitlines()) == 2


def _wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.1)
