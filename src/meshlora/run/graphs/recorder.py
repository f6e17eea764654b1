"""Recording of kernels by CUDA: a function runs once for the record, and then as often as wanted without its host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Run = Callable[[], None]


class Recorder(Protocol):
    """What records a function whose inputs and results are tensors that stay where they are."""

    def record(self, run: Run) -> Run:
        """What runs the work of `run` again. `run` itself is called too, and its results then are of no use."""


class CudaRecorder:
    """Graphs of CUDA. All take their memory from one pool: they never run at the same time, and none needs what another
    has left there.
    """

    def __init__(self) -> None:
        self._aside: Any = None  # the stream of all
        self._pool: Any = None
        self._first: Any = None  # held, or a pool that nobody uses could not be taken again

    def record(self, run: Run) -> Run:
        """See `Recorder`."""
        here = torch.cuda.current_stream()
        # One, and that of the record: libraries keep memory for each stream that they have been called on.
        aside = self._aside = self._aside or torch.cuda.Stream()
        aside.wait_stream(here)
        try:
            with torch.cuda.stream(aside):
                run()  # kernels are compiled and libraries take their memory, which no record may
        finally:
            here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: NCCL has one that looks after its messages, which torch forbids in others by default.
        how: dict[str, Any] = {"pool": self._pool, "stream": aside, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.stream(here), torch.cuda.graph(graph, **how):
                run()
        except RuntimeError as error:  # the end of a capture that has failed raises too, without the cause
            raise (error.__context__ or error) from None
        self._pool, self._first = graph.pool(), self._first or graph
        replay: Run = graph.replay
        return replay


def recorder() -> Recorder | None:
    """That of this machine; None: it has no GPU."""
    return CudaRecorder() if torch.cuda.is_available() else None
