"""A pool of ranks on this machine: seconds to start, milliseconds a call.

Owns: processes that share one group and run functions that this process names, and what becomes of their errors, of
signals, and of the ranks when this process is gone.
`pool.run(function, *args)` calls a module-level function on every rank and returns the list of its results. An error on
one rank comes back with that rank's traceback; a rank that does not answer ends the pool, and the next call starts it
again. Training has its own launcher (`train.launch`): a pool is for many short runs, one after another.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from meshlora.errors import MeshloraError
from meshlora.train.launch import LOST_PEER

# After one rank failed, how long the others may take to fail as well before they are ended.
_GRACE_S = 5.0
# From the end of a rank's pipe to the end of its process.
_EXIT_S = 2.0

# Whether a call was answered with a result, the result or the traceback, the exception where we raised it on purpose.
Answer = tuple[bool, Any, MeshloraError | None]


class RankError(MeshloraError, AssertionError):
    """A rank of the pool raised; the message is its traceback, `cause` the exception where we raised it on purpose."""

    def __init__(self, message: str, cause: MeshloraError | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class RankEndedError(MeshloraError):
    """The process of a rank ended without an answer: somebody killed it, or the machine did.

    It says nothing of what ran there, so it is neither a difference nor a fault that was caught.
    """


class Pool:
    """`size` processes that share one process group; alone, a plain process of its own."""

    def __init__(self, size: int, *, device: str = "cpu") -> None:
        self.size, self.device = size, device
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._folder: Path | None = None

    def start(self) -> None:
        """Begin to start the ranks; returns at once."""
        if self._pipes:
            return
        context = multiprocessing.get_context("spawn")
        with _signals_held():
            self._folder = Path(tempfile.mkdtemp(prefix="meshlora-"))
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                place = (rank, self.size, str(self._folder / "store"), self.device)
                process = context.Process(target=_serve, args=(*place, theirs), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """Results of `function(*args)` by rank.

        Raises:
            RankError: a rank raised, or gave no answer in time. RankEndedError: its process ended first of all.
                The ranks are ended.
        """
        self.start()
        try:
            return self._run(function, args, timeout_s)
        except BaseException:
            self.close()
            raise

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the rank has ended; what it left in its pipe is read below
                pipe.send((function, args))
        answers: dict[int, Answer] = {}
        first_ended: int | None = None
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size and time.monotonic() < deadline:
            waiting = [p for rank, p in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, timeout=0.2)
            for rank, pipe in enumerate(self._pipes):
                if pipe not in ready:
                    continue
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    if all(ok for ok, _, _ in answers.values()):
                        first_ended = rank
                    answers[rank] = (False, self._how_it_ended(rank), None)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if first_ended is not None:
            raise RankEndedError(f"rank {first_ended} of {self.size}: {answers[first_ended][1]}")
        errors = [(rank, text, cause) for rank, (ok, text, cause) in answers.items() if not ok]
        if errors or len(answers) < self.size:
            silent = sorted(set(range(self.size)) - set(answers))
            waited_s = _GRACE_S if errors else timeout_s
            raise _first_error(
                errors, silent=f"ranks without an answer in {waited_s:.0f} s: {silent}" if silent else ""
            )
        return [answers[rank][1] for rank in range(self.size)]

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(_EXIT_S)
        code = process.exitcode
        if code is None or code >= 0:
            return f"the process ended by itself{f' with exit code {code}' if code else ''}"
        memory = "; the machine may be out of memory" if code == -signal.SIGKILL else ""
        return f"the process was ended by signal {-code} ({signal.Signals(-code).name}){memory}"

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._pipes, self._processes, self._folder = [], [], None


def _first_error(errors: list[tuple[int, str, MeshloraError | None]], *, silent: str) -> RankError:
    """Who gave no answer, who only lost contact with another, and last, as in a traceback, the first cause."""
    errors = errors[::-1]
    errors.sort(key=lambda e: not any(sign in e[1] for sign in LOST_PEER))
    report = "\n".join([silent, *(f"rank {rank}:\n{text}" for rank, text, _ in errors)])
    return RankError(report.strip(), errors[-1][2] if errors else None)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """No signal comes between the start of a rank and its entry in the list of those to end.

    The ranks inherit this: Ctrl-C goes to all processes of a terminal, and is for the one that ends them.
    """
    resource_tracker.ensure_running()  # else the first process starts it, which lets the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(rank: int, size: int, store: str, device: str, pipe: Connection) -> None:
    """Body of one rank: answer calls until the pipe closes, or the parent is gone."""
    threading.Thread(target=_end_with_parent, args=(Path(store).parent,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # with it multiprocessing ends what nobody closed
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            _become_rank(rank, size, store, device)
        except BaseException as error:  # noqa: BLE001 - it is the answer to the first call
            pipe.send(_failure(error))
            return
        while True:
            function, args = pipe.recv()
            try:
                answer: Answer = (True, function(*args), None)
            except BaseException as error:  # noqa: BLE001 - whatever it was, it travels to the caller as text
                answer = _failure(error)
            pipe.send(answer)


def _become_rank(rank: int, size: int, store: str, device: str) -> None:
    import torch
    from transformers.utils import logging

    from meshlora.parallel.groups import become_rank

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.filterwarnings(
        "ignore", message=".*is_gradient_checkpointing.*"
    )  # peft calls what transformers deprecates
    torch.set_num_threads(1)
    become_rank(rank, size, device, store=store)


def _failure(error: BaseException) -> Answer:
    return False, traceback.format_exc(), error if isinstance(error, MeshloraError) else None


def _end_with_parent(folder: Path) -> None:
    """Wait for the end of the parent, which is killed where it did not end this rank; leave no file, and end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
