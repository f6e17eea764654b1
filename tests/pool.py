"""A session-wide pool of gloo ranks: seconds to start, milliseconds a test.

`pool.run(function, *args)` calls a module-level function on every rank and returns the list of its results. An
exception on one rank comes back with that rank's traceback; a rank that does not answer ends the pool.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# After one rank failed, how long the others may take to fail as well before they are ended.
_GRACE_S = 5.0


class RankError(AssertionError):
    """A rank of the pool raised; the message is its traceback."""


class Pool:
    """`size` processes that share one gloo group. Started on first use, and again after a failure broke it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """Results of `function(*args)` by rank."""
        if not self._pipes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size and time.monotonic() < deadline:
            waiting = [p for rank, p in enumerate(self._pipes) if rank not in answers]
            for pipe in wait(waiting, timeout=0.2):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = self._pipes[rank].recv()
                except EOFError:
                    answers[rank] = (False, "the process ended")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        errors = {rank: value for rank, (ok, value) in answers.items() if not ok}
        if errors or len(answers) < self.size:
            self.close()
            silent = sorted(set(range(self.size)) - set(answers))
            report = "\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items())
            raise RankError(f"{report}\nranks without an answer: {silent}")
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    """Body of one rank: answer calls until the pipe closes."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), TOKENIZERS_PARALLELISM="false")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except BaseException:  # noqa: BLE001 - whatever it was, it travels to the test as text
            answer = (False, traceback.format_exc())
        pipe.send(answer)
