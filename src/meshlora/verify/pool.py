"""A pool of ranks on this machine: seconds to start, milliseconds a call.

Owns: processes that share one group and run functions that this process names, and what becomes of their errors.
`pool.run(function, *args)` calls a module-level function on every rank and returns the list of its results. An error on
one rank comes back with that rank's traceback; a rank that does not answer ends the pool, and the next call starts it
again. Training has its own launcher (`train.launch`): a pool is for many short runs, one after another.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from meshlora.errors import MeshloraError

# After one rank failed, how long the others may take to fail as well before they are ended.
_GRACE_S = 5.0
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")


class RankError(MeshloraError, AssertionError):
    """A rank of the pool raised; the message is its traceback, `cause` the exception where we raised it on purpose."""

    def __init__(self, message: str, cause: MeshloraError | None = None) -> None:
        super().__init__(message)
        self.cause = cause


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
            RankError: a rank raised, ended, or gave no answer in time. The ranks are ended.
        """
        self.start()
        try:
            return self._run(function, args, timeout_s)
        except BaseException:
            self.close()
            raise

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, tuple[bool, Any, MeshloraError | None]] = {}
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
                    answers[rank] = (False, "the process ended", None)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        errors = [(rank, text, cause) for rank, (ok, text, cause) in answers.items() if not ok]
        if errors or len(answers) < self.size:
            raise _first_error(errors, silent=sorted(set(range(self.size)) - set(answers)))
        return [answers[rank][1] for rank in range(self.size)]

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


def _first_error(errors: list[tuple[int, str, MeshloraError | None]], *, silent: list[int]) -> RankError:
    """Who gave no answer, who only lost contact with another, and last, as in a traceback, the first cause."""
    errors = errors[::-1]
    errors.sort(key=lambda e: not any(sign in e[1] for sign in _LOST_PEER))
    report = "\n".join(f"rank {rank}:\n{text}" for rank, text, _ in errors)
    if silent:
        report = f"ranks without an answer: {silent}\n{report}"
    return RankError(report.strip(), errors[-1][2] if errors else None)


def _serve(rank: int, size: int, store: str, device: str, pipe: Connection) -> None:
    """Body of one rank: answer calls until the pipe closes."""
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
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any, MeshloraError | None] = (True, function(*args), None)
        except BaseException as error:  # noqa: BLE001 - whatever it was, it travels to the caller as text
            answer = (False, traceback.format_exc(), error if isinstance(error, MeshloraError) else None)
        pipe.send(answer)
