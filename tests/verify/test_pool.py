"""A pool whose ranks fail, end or hang says which; ranks without a parent end, and leave nothing behind."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import open_mesh
from meshlora.verify import pool as module
from meshlora.verify.pool import Pool, RankEndedError, RankError
from meshlora_ground.errors import MeshloraError, UserError
from meshlora_ground.topology import Topology
from tests.processes import Started, wait_until

LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:1234"
OWN = "ZeroDivisionError: the cause"
KILLED = "killed"


class _Ended:
    """A process that was killed."""

    exitcode = -signal.SIGKILL

    def join(self, timeout: float | None = None) -> None:
        pass

    def kill(self) -> None:
        pass


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pool]]:
    """`answered("text", None, KILLED)`: a pool without processes: rank 0 raised, rank 1 is silent, rank 2 is dead."""
    monkeypatch.setattr(module, "_GRACE_S", 0.3)
    open_: list[Connection] = []

    def make(*answers: Any) -> Pool:
        pool = Pool(len(answers))
        for answer in answers:
            ours, theirs = Pipe()
            open_.append(theirs)
            pool._pipes.append(ours)
            pool._processes.append(_Ended())
            if answer == KILLED:
                theirs.close()
            elif isinstance(answer, str):
                theirs.send((False, answer, None))
            elif answer is not None:
                theirs.send(answer)
        return pool

    yield make
    for pipe in open_:
        pipe.close()


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ((KILLED, None), "rank 0: the process was ended by signal 9 (SIGKILL); the machine may be out of memory"),
        # What the others say of it arrives first, or last; it is no cause.
        ((LOST, KILLED), "rank 1: the process was ended by signal 9"),
        ((KILLED, LOST), "rank 0: the process was ended by signal 9"),
        ((None, None), "ranks without an answer in 0 s: [0, 1]"),
        ((LOST, None), "ranks without an answer in 0 s: [1]"),
        (((True, 1, None), None), "ranks without an answer in 0 s: [1]"),
        # All time out in different collectives.
        ((LOST, LOST), "rank 0:\nRuntimeError: Connection closed by peer"),
        ((LOST, (False, "", RankEndedError("the machine has no room for it (MemoryError: )"))), "rank 1: the machine"),
    ],
)
def test_without_a_cause_on_any_rank_there_is_no_verdict(
    answers: tuple[Any, ...], said: str, answered: Callable[..., Pool]
) -> None:
    with pytest.raises(RankEndedError) as caught:
        answered(*answers).run(print, timeout_s=0.4)
    assert str(caught.value).startswith(said)
    assert not isinstance(caught.value, RankError)
    assert caught.value.exit_code == MeshloraError.exit_code == 1


@pytest.mark.parametrize("answers", [(OWN, None), (OWN, LOST), (LOST, OWN), (OWN, KILLED), (KILLED, OWN)])
def test_error_that_a_rank_raised_is_the_last_thing_that_is_said(
    answers: tuple[Any, ...], answered: Callable[..., Pool]
) -> None:
    with pytest.raises(RankError) as caught:
        answered(*answers).run(print, timeout_s=5)
    said = str(caught.value)
    assert said.endswith(f"rank {answers.index(OWN)}:\n{OWN}")
    assert len(said.splitlines()) > 2 or None in answers


def test_users_mistake_on_a_rank_keeps_its_kind(answered: Callable[..., Pool]) -> None:
    mistake = UserError("tp=3", "must divide 8")
    with pytest.raises(RankError) as caught:
        answered(LOST, (False, "traceback", mistake)).run(print)
    assert isinstance(caught.value.cause, UserError)
    assert caught.value.cause.given == "tp=3"


def _die_on(rank: int) -> None:
    """Body of a rank: `rank` is killed in the middle of a collective, as by a machine without memory."""
    world = open_mesh(Topology(dp=2)).world
    all_reduce_sum(torch.ones(1), world)
    if world.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce_sum(torch.ones(1), world)


def _hang_on(rank: int) -> None:
    world = open_mesh(Topology(dp=2)).world
    if world.rank == rank:
        time.sleep(1000)
    all_reduce_sum(torch.ones(1), world)


def _sum() -> float:
    return all_reduce_sum(torch.ones(1), open_mesh(Topology(dp=2)).world).item()


def test_ranks_that_are_killed_or_hang_end_the_pool_and_the_next_call_starts_it_again() -> None:
    pool = Pool(2)
    try:
        with pool.scratch(1000) as folder:
            with pytest.raises(RankEndedError, match=r"rank 1: the process was ended by signal 9 \(SIGKILL\)"):
                pool.run(_die_on, 1)
            assert not folder.exists()  # it goes with the ranks
        assert pool.run(_sum) == [2.0, 2.0]
        processes, folders = list(pool._processes), list(pool._folders)
        started = time.monotonic()
        with pytest.raises(RankEndedError, match=r"without an answer in 1 s: \[0, 1\]"):
            pool.run(_hang_on, 0, timeout_s=1)
        assert time.monotonic() - started < 10
        assert [process.is_alive() for process in processes] == [False, False]
        assert [folder for folder in folders if folder.exists()] == []
    finally:
        pool.close()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("Tried to allocate 20.00 GiB"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_machine_without_room_is_no_cause(error: Exception, answered: Callable[..., Pool]) -> None:
    with pytest.raises(RankEndedError, match="rank 1: the machine has no room for it"):
        answered(LOST, module._failure(error)).run(print)


PARENT = """
from meshlora.verify import pool as module
from meshlora.verify.pool import Pool
from tests.verify.test_pool import write_for_ever

module._LIBRARIES = {libraries}

if __name__ == "__main__":
    pool = Pool(2)
    with pool.scratch(1000) as memory, pool.scratch(2**62) as disk:
        print(memory, disk, flush=True)
        pool.run(write_for_ever, [str(memory), str(disk)])
"""


def write_for_ever(folders: list[str]) -> None:
    """Body of two ranks: one writes new files in new folders, without a pause; one notices nothing."""
    if dist.get_rank() == 1:
        time.sleep(3600)
    for number in itertools.count():
        for folder in folders:
            new = Path(folder) / f"{os.getpid()}-{number % 100}"
            new.mkdir(exist_ok=True)
            (new / "file").write_bytes(bytes(1000))


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_parent_that_is_killed_leaves_neither_ranks_nor_files(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT.format(libraries=module._LIBRARIES))
    root = Path(__file__).parents[2]
    source = Path(module.__file__).parents[2]
    path = os.pathsep.join([str(source), str(root)])
    with Started(tmp_path, str(tmp_path / "parent.py"), PYTHONPATH=path) as parent:
        assert parent.process.stdout is not None
        folders = [Path(name) for name in parent.process.stdout.readline().split()]
        wait_until(lambda: all(len(list(folder.iterdir())) > 10 for folder in folders))
        assert len(parent.living()) >= 2
        assert set(parent.folders()) > {folder.parent for folder in folders}  # and that of the ranks' own parent
        parent.process.send_signal(number)
        parent.end()
        wait_until(lambda: not parent.living(), timeout_s=60)
        assert parent.folders() == []


FORKING = """
import os, pathlib
from meshlora.verify import pool as module
from meshlora.verify.pool import Pool, stop_forking

module._LIBRARIES = module._LIBRARIES[:2]  # the product's own, and what takes less time than the others

def children():
    return [p.name for p in pathlib.Path("/proc").glob("[0-9]*/status") if f"PPid:\\t{os.getpid()}\\n" in p.read_text()]

if __name__ == "__main__":
    pool = Pool(1)
    pool.run(os.getpid)
    stop_forking()  # not with a rank that is needed
    pool.run(os.getpid)
    pool.close()
    before = len(children())
    stop_forking()
    print(before, len(children()))
"""


@pytest.mark.long
def test_what_ranks_are_forked_from_ends_when_no_rank_is_left(tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text(FORKING)
    with Started(tmp_path, str(tmp_path / "forking.py"), PYTHONPATH=str(Path(module.__file__).parents[2])) as parent:
        code, out, err = parent.end()
    assert (code, err) == (0, "")
    before, after = map(int, out.split())
    assert after == before - 1


def test_ranks_are_forked_where_that_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with CUDA, and not where the path of a socket would be too long."""
    assert module._context("cpu")[0].get_start_method() == "forkserver"
    assert module._context("cuda")[0].get_start_method() == "spawn"
    monkeypatch.setattr(module.util, "get_temp_dir", lambda: "/" + 100 * "x")
    assert module._context("cpu")[0].get_start_method() == "spawn"


def test_scratch_is_in_memory_only_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(module, "_MEMORY", tmp_path / "memory")
    folders = module.new_scratch()
    memory, disk = folders
    assert memory.parent == tmp_path / "memory"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(4000, 0, 4000))  # type: ignore[attr-defined]
    assert module.with_room(folders, 1000) == memory
    assert module.with_room(folders, 1001) == disk
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**50, 0, 2**50))  # type: ignore[attr-defined]
    assert module.with_room(folders, 2**30) == memory
    assert module.with_room(folders, 2**30 + 1) == disk
    module.remove(folders)
    assert not memory.exists()
    assert not disk.exists()


def test_without_memory_that_can_be_written_the_disk_is_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MEMORY", tmp_path / "nowhere")
    folders = module.new_scratch()
    assert len(folders) == 1
    assert module.with_room(folders, 1) == folders[0]
    module.remove(folders)


def test_ranks_are_started_without_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        def Pipe(self) -> None:
            raise ConnectionError(os.environ["PYTHONSAFEPATH"])

    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(module, "_context", lambda _: (Context(), []))
    pool = Pool(1)
    with pytest.raises(ConnectionError, match="1"):
        pool.start()
    pool.close()
    assert "PYTHONSAFEPATH" not in os.environ


@pytest.mark.proof  # the next pool waits for a server of its own
def test_fork_server_runs_no_file_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started as `python -c`, which looks there first, for the libraries that it imports too."""
    (tmp_path / "run_by_mistake.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_LIBRARIES", ("run_by_mistake", "meshlora.verify.forked"))
    module.stop_forking()
    pool = Pool(1)
    try:
        assert pool.run(os.getppid, timeout_s=60) != [os.getpid()], "a server forks it"
    finally:
        pool.close()
        module.stop_forking()  # the next starts with all libraries
    assert not (tmp_path / "was_run").exists()
