"""Launches of `meshlora train` with faults in their ranks: a run file in a folder of its own, and how to start it.

Faults come from a `sitecustomize.py` on PYTHONPATH, which every rank imports before anything else: the product has no
code for being tested.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshlora_judge.twin import twin_config
from tests.ranks.forked import Forked
from tests.run_files import copy_tokenizer, write_run_file

# From the fault to the end of every process.
PATIENCE_S = 30.0
# What is tested here comes after the preflight, which takes longer than all of it.
TRAIN = ("-m", "meshlora", "train", "run.yaml", "--nproc", "2", "--no-preflight")


FAULTS = '''
import os, signal, sys, time
from pathlib import Path

sys.modules["bitsandbytes"] = None  # as where it is not installed: PEFT imports it, a fifth of the start of a process
here = Path(__file__).parent
if "RANK" in os.environ:
    rank = int(os.environ["RANK"])
    (here / f"pid-{rank}").write_text(str(os.getpid()))
    from meshlora.run import trainer

    def at(step, on_rank, fault):
        """Call `fault` in the middle of `step` (from 1) of rank `on_rank`: after its loss, before its backward."""
        if rank != on_rank:
            return
        train_step, losses, now = trainer.Trainer.train_step, trainer.Trainer._losses, [0]

        def noticed_step(self, adapters):
            now[0] = adapters[0].done + 1
            return train_step(self, adapters)

        def faulty_losses(self, *given):
            ((loss, sums),) = losses(self, *given)
            if now[0] != step:
                return [(loss, sums)]
            (here / "fault-at").write_text(str(time.time()))
            return [(fault(loss), sums)]

        trainer.Trainer.train_step, trainer.Trainer._losses = noticed_step, faulty_losses

    def die(_=None):
        os.kill(os.getpid(), signal.SIGKILL)
'''


@dataclass
class Job:
    """A run file in a folder of its own, and how to start it: anew, or forked from a process that has all imported."""

    folder: Path
    is_forked: bool = False
    started: list[subprocess.Popen[str] | Forked] = field(default_factory=list)

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def write(self, fault: str = "", **train: object) -> None:
        lines = "".join(json.dumps({"prompt": f"f_{i}():", "completion": f" return {i}"}) + "\n" for i in range(8))
        (self.folder / "train.jsonl").write_text(lines)
        (self.folder / "faults").mkdir()
        (self.folder / "faults" / "sitecustomize.py").write_text(FAULTS + fault)
        write_run_file(
            self.folder / "run.yaml",
            model={"path": str(self.folder.parent / "model")},
            data={"train": "train.jsonl", "max_length": 32, "cache_dir": "cache"},
            train={"output": "output", "steps": 5, "batch_size": 2, "log_every": 1, **train},
            lora={"r": 2, "target_modules": ["q_proj", "down_proj"]},
            topology="tp=2",
            device="cpu",
        )

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str] | Forked:
        path = os.pathsep.join([str(self.folder / "faults"), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
        process = self._forked(command, env) if self.is_forked else self._anew(command, env)
        self.started.append(process)
        return process

    def _forked(self, command: tuple[str, ...], env: dict[str, str]) -> Forked:
        return Forked(self.folder, command or TRAIN, env)

    def _anew(self, command: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *(command or TRAIN)],
            cwd=self.folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Where the tests themselves run in the background, a shell has them ignore it, and so would this process.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )

    def end(self) -> None:
        """Whatever the test found, nothing of it is left for the next."""
        for process in self.started:
            process.kill()
        for pid in self.living_ranks():  # they may hold what is read below
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.communicate()

    def run(self, *command: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr), once all has ended, in time after the fault where there was one."""
        process = self.start(*command)
        out, err = process.communicate(timeout=120)
        fault_at = self.folder / "faults" / "fault-at"
        if fault_at.exists():
            assert time.time() - float(fault_at.read_text()) < PATIENCE_S
        assert self.living_ranks() == []
        assert process.returncode is not None
        return process.returncode, out, err

    def trains(self) -> bool:
        file = self.output / "metrics.jsonl"
        return file.exists() and file.stat().st_size > 0

    def checkpoints(self) -> list[Path]:
        return sorted((self.output / "checkpoints").glob("step-*"))

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
    copy_tokenizer(folder / "model")
    return folder


@pytest.fixture
def job(base: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    yield from _job(base, request.node.name, is_forked=False)


# The start of a process takes five seconds, and what follows one. Both ways go through the same code of the product.
@pytest.fixture(name="job", params=["forked", pytest.param("anew", marks=pytest.mark.proof)])
def job_either_way(base: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    yield from _job(base, request.node.name, is_forked=request.param == "forked")


def _job(base: Path, name: str, *, is_forked: bool) -> Iterator[Job]:
    folder = base / name
    folder.mkdir()
    job = Job(folder, is_forked)
    yield job
    job.end()
