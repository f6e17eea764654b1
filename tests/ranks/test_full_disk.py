"""A disk that is full when a checkpoint is written: the last one stays whole, and the run ends or goes on.

By a limit on the size of files, which every machine has, and on a tmpfs of a few MB (marked `mounts`: in a container
that may not mount anything there is no small file system; the first kind runs there too).
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshlora.run.checkpoint.manifest import read_whole
from meshlora.run.trained import TrainedAdapter
from tests.pool import Pool
from tests.processes import own_mounts
from tests.ranks.jobs import TRAIN, Job, base, job_either_way
from tests.ranks.test_trainer import run_and_keep_groups
from tests.run_files import metrics_of

__all__ = ["base", "job_either_way"]  # fixtures


FULL_DISK = """
    import resource
    from meshlora.run.trained import TrainedAdapter
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing then raises
    save = TrainedAdapter._save

    def save_on_full_disk(self, name, *given, **options):
        if rank == 0 and name.endswith("step-000003"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        try:
            save(self, name, *given, **options)
        finally:
            if rank == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    TrainedAdapter._save = save_on_full_disk
"""


@pytest.mark.long
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
    assert read_whole(job.output / "checkpoints" / "latest").step == 2


def _train_on_a_disk_that_is_full_for_a_while(folder: Path) -> str:
    """Body of a rank of a pool; returns what it says."""
    save, rank, said = TrainedAdapter._save, dist.get_rank(), io.StringIO()

    def save_on_full_disk(self: TrainedAdapter, name: str, *given: Any, **options: Any) -> None:
        with _no_file_above(100) if rank == 0 and name.endswith("step-000003") else contextlib.nullcontext():
            save(self, name, *given, **options)

    with contextlib.chdir(folder), contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainedAdapter, "_save", save_on_full_disk)
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
    steps = [line["step"] for line in metrics_of(job.output)]
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
    from meshlora.run.trained import TrainedAdapter
    save, ballast = TrainedAdapter._save, Path("output/ballast")

    def save_on_full_disk(self, name, *given, **options):
        if rank == 0 and name.endswith("step-000003"):
            with ballast.open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError as error:
                    (here / "said").write_text(error.strerror)
        try:
            save(self, name, *given, **options)
        finally:
            if rank == 0:
                ballast.unlink(missing_ok=True)

    TrainedAdapter._save = save_on_full_disk
"""


def _on_tmpfs(job: Job, size: str, *command: str) -> tuple[int, str, str]:
    """A run whose output folder is a tmpfs; (exit code, stdout, stderr). What it left is in `saved`."""
    (job.folder / "output").mkdir()
    path = os.pathsep.join([str(job.folder / "faults"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*own_mounts(), "sh", "-c", ON_TMPFS.format(size=size), "sh", sys.executable, *command],
        cwd=job.folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.proof  # by default the limit on the size of files ends it
@pytest.mark.mounts
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
    assert read_whole(job.folder / "saved" / "checkpoints" / "latest").step == len(steps)


@pytest.mark.proof
@pytest.mark.mounts
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
    assert [line["step"] for line in metrics_of(saved)] == [1, 2, 3, 4, 5]
