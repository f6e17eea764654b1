"""A failing rank ends all ranks, with its cause shown once; what it leaves on disk is whole.

Real launches. Faults come from a `sitecustomize.py` on PYTHONPATH, which every rank imports before anything else: the
product has no code for being tested.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from meshlora.plan.twin import twin_config
from meshlora.train.checkpoint import read_checkpoint
from meshlora.train.trainer import Trainer
from tests.pool import Pool
from tests.ranks.test_trainer import run_and_keep_groups

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


FULL_DISK = """
    import resource
    from meshlora.train.trainer import Trainer
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing then raises
    save = Trainer._save

    def save_on_full_disk(self, name, **options):
        if rank == 0 and name.endswith("step-000003"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        try:
            save(self, name, **options)
        finally:
            if rank == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    Trainer._save = save_on_full_disk
"""


@dataclass
class Job:
    """A run file in a folder of its own, and how to start it."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

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
        process = subprocess.Popen(
            [sys.executable, *(command or TRAIN)],
            cwd=self.folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Where the tests themselves run in the background, a shell has them ignore it, and so would this process.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        """Whatever the test found, nothing of it is left for the next."""
        for process in self.started:
            process.kill()
            process.communicate()
        for pid in self.living_ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run(self, *command: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr), once all has ended, in time after the fault where there was one."""
        process = self.start(*command)
        out, err = process.communicate(timeout=120)
        fault_at = self.folder / "faults" / "fault-at"
        if fault_at.exists():
            assert time.time() - float(fault_at.read_text()) < PATIENCE_S
        assert self.living_ranks() == []
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
    for file in TOKENIZER.glob("*token*.json"):
        shutil.copy(file, folder / "model")
    return folder


@pytest.fixture
def job(base: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    folder = base / request.node.name
    folder.mkdir()
    job = Job(folder)
    yield job
    job.end()


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


# By default one of the two comes first here, and the other twice in the next test but two: both go the same way.
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_first_signal_saves_and_says_how_to_go_on(number: signal.Signals, job: Job) -> None:
    job.write(steps=1_000_000)
    process = job.start(*TRAIN, "--set", "train.schedule=constant")
    _wait_until(job.trains)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, ""), err
    assert job.living_ranks() == []
    (saved,) = job.checkpoints()
    assert int(saved.name.removeprefix("step-")) == len((job.output / "metrics.jsonl").read_text().splitlines())
    assert out.splitlines()[-2:] == [
        f"stopped as asked; saved in output/checkpoints/{saved.name}. Go on with:",
        "meshlora train run.yaml --nproc 2 --no-preflight --set train.schedule=constant --resume auto",
    ]
    assert not (job.output / "adapter").exists()


def test_signal_under_torchrun_saves_on_all_ranks(job: Job) -> None:
    job.write(steps=1_000_000)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "meshlora", "train", "run.yaml")
    process = job.start(*torchrun, "--no-preflight")
    _wait_until(job.trains)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert job.living_ranks() == []
    (saved,) = job.checkpoints()
    assert f"saved in output/checkpoints/{saved.name}" in out
    assert "meshlora train run.yaml --no-preflight --resume auto" in out


def test_signal_to_a_single_process_saves(job: Job) -> None:
    job.write(steps=1_000_000)
    process = job.start("-m", "meshlora", "train", "run.yaml", "--no-preflight", "--set", "topology=''")
    _wait_until(job.trains)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    (saved,) = job.checkpoints()
    assert (job.output / "checkpoints" / "latest").resolve() == saved.resolve()
    assert out.splitlines()[-1].endswith("--resume auto")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_second_signal_ends_all_ranks_at_once(number: signal.Signals, job: Job) -> None:
    # Rank 1 never ends its step, so the first signal cannot be followed.
    job.write("\n    at(3, 1, lambda loss: time.sleep(1000))\n")
    process = job.start()
    _wait_until((job.folder / "faults" / "fault-at").exists)
    process.send_signal(number)
    time.sleep(1)
    assert process.poll() is None
    begun = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - begun < 10
    assert process.returncode == 128 + number
    assert err.splitlines() == ["interrupted" if number == signal.SIGINT else "error: ended by signal 15 (SIGTERM)"]
    assert job.living_ranks() == []


def test_rank_that_hangs_is_named_with_the_collective(job: Job) -> None:
    job.write("\n    at(3, 1, lambda loss: time.sleep(1000))\n", timeout_s=8)
    code, _, err = job.run()
    assert code == 1
    assert len(err.splitlines()) == 1
    assert "was given up after 8 s (train.timeout_s): rank 1 did not arrive; rank 1 was last in" in err
    assert err.startswith("error: rank 0: all_reduce over ranks 0, 1 (number ")


def test_full_disk_ends_all_ranks_and_leaves_the_last_checkpoint(job: Job) -> None:
    """From step 3 on no file may be written beyond 100 bytes, as the limit of this process says."""
    job.write(FULL_DISK, save_every=1)
    code, _, err = job.run()
    assert code == 1
    assert err.startswith("error: rank 0: output/checkpoints/step-000003: the adapter could not be written (")
    assert "File too large" in err
    assert len(err.splitlines()) == 1
    assert [folder.name for folder in job.checkpoints()] == ["step-000001", "step-000002"]
    names = {file.name for file in (job.output / "checkpoints").iterdir()}
    assert names == {"step-000001", "step-000002", "latest"}, "nothing half is left"
    assert read_checkpoint(job.output / "checkpoints" / "latest").step == 2


def _train_on_a_disk_that_is_full_for_a_while(folder: Path) -> str:
    """Body of a rank of a pool; returns what it says."""
    save, rank, said = Trainer._save, dist.get_rank(), io.StringIO()

    def save_on_full_disk(self: Trainer, name: str, **options: Any) -> None:
        with _no_file_above(100) if rank == 0 and name.endswith("step-000003") else contextlib.nullcontext():
            save(self, name, **options)

    with contextlib.chdir(folder), contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_save", save_on_full_disk)
        run_and_keep_groups(Path("run.yaml"), 2)
    return said.getvalue()


@contextlib.contextmanager
def _no_file_above(num_bytes: int) -> Iterator[None]:
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing then raises
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_full_disk_for_a_while_is_gone_through_where_the_run_file_says_so(
    job: Job, pools: Callable[[int], Pool]
) -> None:
    job.write(save_every=1, on_save_error="continue")
    out, _ = pools(2).run(_train_on_a_disk_that_is_full_for_a_while, job.folder)
    assert "step 3: output/checkpoints/step-000003: the adapter could not be written (" in out
    assert [folder.name for folder in job.checkpoints()] == ["step-000001", "step-000002", "step-000004"]
    steps = [json.loads(line)["step"] for line in (job.output / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]
    assert (job.output / "adapter").is_dir()


# --- a small file system that really is full

# The tmpfs goes with the namespace, so that nothing is left to unmount; what is in it at the end is copied out.
ON_TMPFS = """
mount -t tmpfs -o size={size} none output || exit 99
"$@"
code=$?
mkdir saved && cp -a output/. saved
exit $code
"""
BALLAST = """
    from meshlora.train.trainer import Trainer
    save, ballast = Trainer._save, Path("output/ballast")

    def save_on_full_disk(self, name, **options):
        if rank == 0 and name.endswith("step-000003"):
            with ballast.open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError as error:
                    (here / "said").write_text(error.strerror)
        try:
            save(self, name, **options)
        finally:
            if rank == 0:
                ballast.unlink(missing_ok=True)

    Trainer._save = save_on_full_disk
"""


@functools.cache
def _unshare() -> tuple[str, ...]:
    """How a process gets mounts of its own here: as an ordinary user, or as root where users may not."""
    for words in (("unshare", "--user", "--map-root-user", "--mount"), ("unshare", "--mount")):
        tried = [*words, "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
        if shutil.which("unshare") and subprocess.run(tried, capture_output=True, check=False).returncode == 0:
            return words
    pytest.skip("no file system can be mounted here, neither in a user namespace nor as root; FULL_DISK is tested")


def _on_tmpfs(job: Job, size: str, *command: str) -> tuple[int, str, str]:
    """A run whose output folder is a tmpfs; (exit code, stdout, stderr). What it left is in `saved`."""
    (job.folder / "output").mkdir()
    path = os.pathsep.join([str(job.folder / "faults"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*_unshare(), "sh", "-c", ON_TMPFS.format(size=size), "sh", sys.executable, *command],
        cwd=job.folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_checkpoints_that_fill_a_file_system_end_the_run_with_the_last_one_whole(job: Job) -> None:
    job.write(save_every=1, steps=1000)
    alone = ("-m", "meshlora", "train", "run.yaml", "--no-preflight", "--set", "topology=''")
    code, _, err = _on_tmpfs(job, "4m", *alone, "--set", "lora.r=64")
    assert code == 1, err
    steps = [int(f.name.removeprefix("step-")) for f in sorted((job.folder / "saved" / "checkpoints").glob("step-*"))]
    assert steps == list(range(1, len(steps) + 1))
    assert 2 < len(steps) < 200, "it was full after some"
    assert err.startswith(
        f"error: rank 0: output/checkpoints/step-{len(steps) + 1:06d}: the adapter could not be written ("
    )
    assert "No space left on device" in err
    assert len(err.splitlines()) == 1
    left = {file.name for file in (job.folder / "saved" / "checkpoints").iterdir()}
    assert left == {f"step-{step:06d}" for step in steps} | {"latest"}, "nothing half is left"
    assert read_checkpoint(job.folder / "saved" / "checkpoints" / "latest").step == len(steps)


def test_run_goes_on_over_a_file_system_that_was_full_for_a_while(job: Job) -> None:
    job.write(BALLAST, save_every=1, on_save_error="continue")
    code, out, err = _on_tmpfs(job, "2m", *TRAIN)
    assert (code, err) == (0, "")
    assert (job.folder / "faults" / "said").read_text() == "No space left on device"
    assert "step 3: output/checkpoints/step-000003: the adapter could not be written (" in out
    saved = job.folder / "saved"
    assert [f.name for f in sorted((saved / "checkpoints").glob("step-*"))] == [
        "step-000001",
        "step-000002",
        "step-000004",
    ]
    assert (saved / "adapter").is_dir()
    assert [json.loads(line)["step"] for line in (saved / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_loss_that_is_not_finite_stops_the_run_and_only_rank_0_speaks_on_the_terminal(job: Job) -> None:
    job.write(
        """
    import warnings
    for each in (0, 1):
        at(3, each, lambda loss: (warnings.warn(f"from rank {rank}"), loss * float("nan"))[1])
"""
    )
    code, out, err = job.run()
    assert code == 1
    assert err.count("error:") == 1
    assert "step 3: the loss is nan: in sequences " in err
    assert "first the loss itself, of finite outputs; lower train.lr" in err
    assert "Traceback" not in err
    assert not (job.output / "adapter").exists()
    assert len((job.output / "metrics.jsonl").read_text().splitlines()) == 2
    assert "from rank 0" in err
    assert "from rank 1" not in out + err
    assert "UserWarning: from rank 1" in (job.output / "logs" / "rank-1.log").read_text()
    assert [file.name for file in (job.output / "logs").iterdir()] == ["rank-1.log"]


def _wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.1)
