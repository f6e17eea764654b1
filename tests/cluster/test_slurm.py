"""A real SLURM with two virtual nodes, and a real mpirun: the bytes of an undisturbed run. `make test-slurm`."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Cluster, cluster, environment
from tests.processes import wait_until
from tests.run_files import copy_lines, write_run_file

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

# Each step takes half a second, so that a time limit of a minute, of which SLURM may signal the end 30 s before, is met
# once at least.
SLOWER = """
import sys, time
if "meshlora" in " ".join(sys.orig_argv) and "train" in sys.orig_argv:
    from meshlora.run import trainer
    train_step = trainer.Trainer.train_step

    def slow_step(self, adapters):
        time.sleep(0.5)
        return train_step(self, adapters)

    trainer.Trainer.train_step = slow_step
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "faults").mkdir()
    (folder / "faults" / "sitecustomize.py").write_text(SLOWER)
    copy_lines("train", folder / "train.jsonl", 0, 100)
    write_run_file(
        folder / "run.yaml",
        data={"train": str(folder / "train.jsonl"), "max_length": 128},
        train={"output": "alone", "steps": 60, "micro_batch_size": 2, "schedule": "constant"},
        topology="dp=2",
        device="cpu",
    )
    return folder


@pytest.fixture(scope="module")
def slurm(folder: Path) -> Iterator[Cluster]:
    with cluster(environment(folder / "faults")) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    """The hash of its adapter. It proves the twin, too: jobs find the proof in the cache."""
    words = [sys.executable, "-m", "meshlora", "train", "run.yaml", "--nproc", "2"]
    done = subprocess.run(words, cwd=folder, env=environment(folder / "faults"), check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    return _hash(folder / "alone")


def _hash(output: Path) -> str:
    return hashlib.sha256((output / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def test_srun_trains_the_adapter_of_one_machine(slurm: Cluster, folder: Path, undisturbed: str) -> None:
    done = slurm.run(*("srun", "-N2", "-n2", "meshlora", "train", "run.yaml", "--set", "train.output=srun"), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert _hash(folder / "srun") == undisturbed


def test_two_steps_of_a_job_do_not_meet_at_one_port(slurm: Cluster, folder: Path, undisturbed: str) -> None:
    one = "srun --exact -N2 -n2 -c1 meshlora train run.yaml --set train.output={0} & {0}=$!; "
    script = "".join(one.format(name) for name in ("left", "right"))
    # By process: bash forgets a job that has ended once it has said so.
    wait = "wait $left; a=$?; wait $right; exit $((a + $?))"
    done = slurm.run("salloc", "-N2", "-n4", "bash", "-c", script + wait, cwd=folder, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert [_hash(folder / name) for name in ("left", "right")] == [undisturbed] * 2


def test_address_without_a_port_is_enough(slurm: Cluster, folder: Path) -> None:
    words = ("meshlora", "train", "run.yaml", "--set", "train.steps=1", "--set", "train.output=port")
    done = slurm.run("env", "MASTER_ADDR=127.0.0.1", "srun", "-N2", "-n2", *words, cwd=folder)
    assert done.returncode == 0, done.stderr


def test_mistake_of_the_run_file_is_one_line_of_meshlora(slurm: Cluster, folder: Path) -> None:
    """Rank 0 has the store in which the others learn of it, and ended before they had."""
    words = ("meshlora", "train", "run.yaml", "--set", "train.warmup_steps=99", "--set", "train.output=mistake")
    done = slurm.run("srun", "-N2", "-n2", *words, cwd=folder)
    assert done.returncode == 2
    ours = {line for line in done.stderr.splitlines() if not line.startswith("srun: ")}
    assert ours == {"error: train.warmup_steps=99: it must be below the 60 steps of the run"}


def test_job_that_meets_its_time_limit_is_requeued_and_ends_with_the_same_bytes(
    slurm: Cluster, folder: Path, undisturbed: str
) -> None:
    words = ("meshlora", "launch-script", "run.yaml", "--set", "train.output=batch", "--slurm", "--nodes", "2")
    limits = ("--cpus-per-gpu", "1", "--time", "1", "--stop-before", "10", "--out", "job.sh")
    assert slurm.run(*words, *limits, cwd=folder).returncode == 0
    number = slurm.run("sbatch", "--parsable", "job.sh", cwd=folder).stdout.strip()
    wait_until(lambda: slurm.job(number).get("JobState") in ("COMPLETED", "FAILED", "TIMEOUT"), 600, pause_s=1)
    log = (folder / f"run-{number}.log").read_text()
    job = slurm.job(number)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert int(job["Restarts"]) >= 1
    assert log.count("stopped as asked; saved in") == int(job["Restarts"])
    assert re.search(r"goes on after step \d+ of dp=2", log)
    assert _hash(folder / "batch") == undisturbed
    print(log)


def test_mpirun_trains_the_adapter_of_one_machine(folder: Path, undisturbed: str) -> None:
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    words = [sys.executable, "-m", "meshlora", "train", "run.yaml", "--set", "train.output=mpirun"]
    done = subprocess.run([*mpirun, *words], cwd=folder, env=environment(folder / "faults"), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert _hash(folder / "mpirun") == undisturbed
