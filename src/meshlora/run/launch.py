"""Starting the ranks of one machine, and reporting the one that failed first.

Owns: the child processes of `--nproc N` from start to end, their folder, and clean-up on a signal. Does not own: what
ranks do, and how a rank reports its end (`run.edge`).

Only this user can reach a run: ranks rendezvous in a file of a folder with mode 0700, and report through an inherited
socket. Nothing outlives a run, whichever of its processes is killed: ranks die with this process
(`meshlora_ground.lifetime`), it ends the others when one ends, and a shell that waits for its end removes the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshlora.processes.launchers import NO_GPUS, place_in_environment
from meshlora.run.edge import ASKING, COMMAND, INSISTING, LAUNCHER, LOST_CONTACT, WORDS, handling_signals
from meshlora_ground.errors import MeshloraError, RankFailedError, UserError
from meshlora_ground.lifetime import Janitor

# How long after a rank's failure the others may still report: the cause may be theirs.
_GRACE_S = 1.0
_LOOK_S = 0.05
_LONGEST_WORD = 2**18
# Ranks create sockets in it, whose paths are limited to 107 bytes.
_LONGEST_FOLDER = 60
_ENDING = (*ASKING, signal.SIGHUP)


@dataclass
class _Rank:
    """A started rank.

    Attributes:
        said: its reports, by key: `failed` with the cause, `result`. trains: whether it handles signals itself.
        ended_at: when it was seen to have ended, or reported a failure.
    """

    number: int
    process: subprocess.Popen[bytes]
    said: dict[str, Any]
    trains: bool = False
    ended_at: float | None = None
    was_killed: bool = False


def launch(
    arguments: Sequence[str],
    *,
    nproc: int,
    on_gpus: bool,
    ranks_per_gpu: int = 1,
    command: str = "",
    timeout_s: float = 600.0,
    talks: bool = False,
) -> Any:
    """Run `python -m meshlora ARGUMENTS` as `nproc` ranks; returns when all have succeeded, with the result of rank 0
    (`edge.leave_result`), if any.

    When one rank fails the others are killed. While all ranks train, a request to stop (`edge.ASKING`) is forwarded to
    them, and they save and exit. on_gpus: whether the ranks see GPUs. command: the user's command, for messages on how
    to resume. timeout_s: how long the others may take to end after rank 0. talks: rank 0 reads our stdin, and once it
    says that it trains each Ctrl-C is for it.

    Raises:
        RankFailedError: the first rank that failed, with its cause; `exit_code` is that rank's.
        KeyboardInterrupt, MeshloraError: on SIGINT or another signal, after the ranks were killed.
    """
    ranks: list[_Rank] = []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # datagrams: reports arrive whole
    with ours, theirs, signals_end_what_was_started(), _folder_of_run() as (folder, janitor):
        try:
            with _interrupts_for_rank_0(ranks) if talks else _requests_handed_on(ranks, nproc):
                for number in range(nproc):
                    store = str(folder / "store")
                    environment = os.environ | place_in_environment(
                        number, nproc, store=store, ranks_per_gpu=ranks_per_gpu
                    )
                    environment |= {LAUNCHER: str(os.getpid()), COMMAND: command, WORDS: str(theirs.fileno())}
                    if not on_gpus:
                        environment |= NO_GPUS
                    environment["TMPDIR"] = str(folder)  # temporary files of a rank are removed with the run
                    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
                    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
                    ranks.append(_Rank(number, _start(arguments, environment, theirs, reads=talks and number == 0), {}))
                theirs.close()
                _watch(ranks, ours, janitor, timeout_s)
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.wait()
    failed = [rank for rank in ranks if rank.process.returncode != 0 and not rank.was_killed]
    if failed:
        raise _first_cause(failed)
    return ranks[0].said.get("result")


def _start(
    arguments: Sequence[str], environment: Mapping[str, str], words: socket.socket, *, reads: bool
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "meshlora", *arguments],  # -P: no file of the folder we are in is code
        env=environment,
        stdin=None if reads else subprocess.DEVNULL,
        pass_fds=[words.fileno()],
        start_new_session=True,  # signals from the terminal reach ranks through this process
    )


@contextlib.contextmanager
def _folder_of_run() -> Iterator[tuple[Path, Janitor]]:
    """(a folder that only this user can enter, the process that removes it if this one is killed)."""
    parent, name = Path(tempfile.gettempdir()), f"meshlora-{secrets.token_hex(6)}"
    if len(os.fsencode(parent / name)) > _LONGEST_FOLDER:
        parent = Path("/tmp")
    folder = parent / name
    janitor = Janitor([folder])  # before the folder exists: it can never be left behind
    try:
        folder.mkdir(mode=0o700)
        yield folder, janitor
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        janitor.dismiss()  # it has nothing to do any more


def _watch(ranks: Sequence[_Rank], words: socket.socket, janitor: Janitor, timeout_s: float) -> None:
    """Wait until all ranks have ended: by themselves, or killed `_GRACE_S` after the first failure. Raises:
    RankFailedError: some still run `timeout_s` after rank 0 has succeeded."""
    while any(rank.process.poll() is None for rank in ranks):
        select.select([words], [], [], _LOOK_S)
        _read(ranks, words)
        now = time.monotonic()
        for rank in ranks:
            if rank.process.poll() is not None and rank.ended_at is None:
                rank.ended_at = now
        failed = [rank.ended_at for rank in ranks if rank.process.returncode and rank.ended_at is not None]
        if failed and now > min(failed) + _GRACE_S:
            for rank in ranks:
                if rank.process.poll() is None:
                    rank.was_killed = True
                    rank.process.kill()
        late = [rank.number for rank in ranks if rank.process.poll() is None]
        if late and ranks[0].process.returncode == 0 and now > (ranks[0].ended_at or now) + timeout_s:
            how_long = f"rank {late[0]} had not ended {timeout_s:g} s after rank 0, which ended well (train.timeout_s)"
            raise RankFailedError(f"{how_long}; what the run has saved is whole")
        if not janitor.is_there():
            raise RankFailedError("the process that removes the folder of this run was ended, so the run was too")
    _read(ranks, words)


def _read(ranks: Sequence[_Rank], words: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            said = json.loads(words.recv(_LONGEST_WORD, socket.MSG_DONTWAIT))
            rank = ranks[said.pop("rank")]
            rank.trains |= said.pop("trains", False)
            rank.said |= said
            if "failed" in said and rank.ended_at is None:
                rank.ended_at = time.monotonic()


@contextlib.contextmanager
def _requests_handed_on(ranks: Sequence[_Rank], nproc: int) -> Iterator[None]:
    """Inside the block requests to stop are forwarded to the ranks, if all train. The second SIGINT or SIGTERM, and
    whatever comes before all train, ends the launch.
    """
    handed_on: list[int] = []

    def handle(number: int, frame: Any) -> None:
        insists = number in INSISTING and any(earlier in INSISTING for earlier in handed_on)
        if insists or len(ranks) < nproc or not all(rank.trains for rank in ranks):
            before[number](number, frame)
            return
        handed_on.append(number)
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(number)

    with handling_signals(ASKING, handle) as before:
        yield


@contextlib.contextmanager
def _interrupts_for_rank_0(ranks: Sequence[_Rank]) -> Iterator[None]:
    """Inside the block SIGINT goes to rank 0, once it handles it: the terminal sends it to this process alone."""

    def handle(number: int, frame: Any) -> None:
        if not ranks or not ranks[0].trains:
            before[number](number, frame)
        elif ranks[0].process.poll() is None:
            ranks[0].process.send_signal(number)

    with handling_signals((signal.SIGINT,), handle) as before:
        yield


@contextlib.contextmanager
def signals_end_what_was_started() -> Iterator[None]:
    """Inside the block the first of `_ENDING` raises; later ones are ignored while the block cleans up.

    Otherwise SIGTERM would end this process at once, and orphan its ranks and temporary folders.

    Raises:
        KeyboardInterrupt, MeshloraError: on SIGINT or another signal.
    """
    came: list[int] = []

    def first(number: int, _: object) -> None:
        if came:
            return
        came.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        ended = MeshloraError(f"ended by signal {number:d} ({signal.Signals(number).name})")
        ended.exit_code = 128 + number
        raise ended

    with handling_signals(_ENDING, first):
        yield


def _first_cause(failed: Sequence[_Rank]) -> RankFailedError:
    """The failure to show: a rank's report, else a killed rank, else one that lost its peers; the first of equals."""

    def order(rank: _Rank) -> tuple[int, float, int]:
        code = rank.process.returncode
        kind = int(code < 0)
        if rank.said.get("failed") == LOST_CONTACT:
            kind = 2
        if code in (-signal.SIGTERM, 128 + signal.SIGTERM):  # the latter of a rank in training
            kind = 3
        return kind, rank.ended_at or 0.0, rank.number

    rank = min(failed, key=order)
    code, words = rank.process.returncode, rank.said.get("failed")
    # An error that all report is shown for the first of them.
    rank = next((each for each in failed if words is not None and each.said.get("failed") == words), rank)
    if code == UserError.exit_code and words is not None:
        cause = RankFailedError(words)
        cause.exit_code = code
        return cause
    if code < 0:
        name = next((f" ({each.name})" for each in signal.Signals if each == -code), "")  # real-time signals have none
        how = "; the machine may be out of memory" if code == -signal.SIGKILL else ""  # which the kernel sends
        return RankFailedError(f"rank {rank.number} was ended by signal {-code}{name}{how}")
    return RankFailedError(f"rank {rank.number}: {words or f'it ended with exit code {code}, and said nothing'}")
