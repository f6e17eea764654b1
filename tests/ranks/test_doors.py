"""While `meshlora train --nproc` trains nobody but its user reaches anything of it, and nothing of it is unpickled."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import is_alive, wait_until
from tests.ranks.forked import Forked
from tests.ranks.jobs import PATIENCE_S, Job, base, job_either_way
from tests.ranks.sockets import listeners_of

__all__ = ["base", "job_either_way"]  # fixtures

NOBODY = 65534
# Of every process: what is unpickled, by whichever way into the module, and what an unpickler looks up.
WATCH_PICKLES = """
import sys, pickle

def note(how):
    if not sys.is_finalizing():
        with open(here / "unpickled", "a") as file:
            file.write(f"{os.getpid()} {how}\\n")

def watched(name, function):
    def call(*args, **kwargs):
        note(name)
        return function(*args, **kwargs)
    return call

for name in ("load", "loads"):
    setattr(pickle, name, watched(name, getattr(pickle, name)))
sys.addaudithook(lambda event, _: note(event) if event == "pickle.find_class" else None)
"""
# Rank 0 and rank 1 stay in their third step until the test has looked.
STAY = """
    def stay(loss):
        (here / f"stays-{rank}").touch()
        while not (here / "go").exists():
            time.sleep(0.05)
        return loss
    at(3, rank, stay)
"""


class Training(NamedTuple):
    """A run whose ranks are in the midst of a step."""

    job: Job
    process: subprocess.Popen[str] | Forked
    temporary: Path

    def started(self) -> list[int]:
        """The processes that the launcher has started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(number) for number in children.split()]


@pytest.fixture
def training(job: Job, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    # Not below the test's own folder, whose path may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="meshlora-test-", ignore_cleanup_errors=True) as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        job.write(STAY + WATCH_PICKLES)
        process = job.start()
        wait_until(lambda: len(list((job.folder / "faults").glob("stays-*"))) == 2)
        yield Training(job, process, Path(temporary))
        job.end()


def test_nobody_else_reaches_a_run_and_nothing_of_it_is_unpickled(training: Training) -> None:
    job, process, temporary = training
    processes = [process.pid, *training.started()]
    assert len(processes) == 4, "the launcher, two ranks, and the shell that waits to clean up"
    for each in processes:
        for listener in listeners_of(each):
            # gloo and torch's stores would listen on a port, which any user of the machine may connect to.
            assert listener.kind == "unix", listener
            assert not listener.at.startswith("@"), "a name without a file has no owner"
            assert Path(listener.at).parent.stat().st_mode & 0o077 == 0, listener
    (folder,) = temporary.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "store").exists()
    if os.geteuid() == 0:
        _try_as_nobody(processes, folder)
    (job.folder / "faults" / "go").touch()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, ""), err
    assert "adapter: output/adapter" in out
    assert not (job.folder / "faults" / "unpickled").exists(), (job.folder / "faults" / "unpickled").read_text()
    assert list(temporary.iterdir()) == []


def _try_as_nobody(processes: list[int], folder: Path) -> None:
    """Another user can neither enter the folder of the run nor look into its processes."""
    script = f'''
import os
os.setgid({NOBODY}); os.setuid({NOBODY})
doors = ["{folder}", "{folder}/store"]
doors += [f"/proc/{{p}}/{{what}}" for p in {processes} for what in ("fd", "environ", "mem")]
for door in doors:
    try:
        os.listdir(door) if os.path.isdir(door) else open(door, "r+b").read(1)
    except (PermissionError, FileNotFoundError):
        continue
    print(door)
'''
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("launcher", marks=pytest.mark.proof),  # also in test_failures
        pytest.param("rank 1", marks=pytest.mark.proof),
        pytest.param("janitor", marks=pytest.mark.proof),
    ],
)
def test_nothing_lives_on_when_a_process_is_killed(victim: str, training: Training) -> None:
    """The ranks of a killed launcher trained on, and its folder stayed."""
    job, process, temporary = training
    started = training.started()
    rank_1 = int((job.folder / "faults" / "pid-1").read_text())
    (janitor,) = set(started) - set(job.started_ranks())
    os.kill({"launcher": process.pid, "rank 1": rank_1, "janitor": janitor}[victim], signal.SIGKILL)
    begun = time.monotonic()
    process.communicate(timeout=5)
    wait_until(lambda: not any(map(is_alive, started)) and not list(temporary.iterdir()), timeout_s=5)
    assert time.monotonic() - begun < 5
