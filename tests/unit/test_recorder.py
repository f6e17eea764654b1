"""Records by CUDA after one that has failed, by stand-ins for torch's: real ones are in `tests/gpu/test_graphs.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshlora.run.graphs.recorder import CudaRecorder


class _Stream:
    def __init__(self) -> None:
        self.waits_for = list[_Stream]()

    def wait_stream(self, other: _Stream) -> None:
        self.waits_for.append(other)


class _Cuda:
    """What torch does: the end of a failed capture raises for itself, and leaves its own stream the current one."""

    def __init__(self) -> None:
        self.current, self.capturing, self.pools = _Stream(), False, list[Any]()

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: _Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        before, self.current, self.capturing = self.current, stream, True
        try:
            yield
        except RuntimeError:
            raise RuntimeError("the capture is not valid") from None
        finally:
            self.capturing = False
        self.pools.append(pool)
        graph.own, self.current = pool or object(), before


class _Graph:
    own: Any = None

    def pool(self) -> Any:
        return self.own

    def replay(self) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    found = _Cuda()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found.current)
    for name, value in {"Stream": _Stream, "stream": found.stream, "graph": found.graph, "CUDAGraph": _Graph}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def _fails(cuda: _Cuda, *, in_capture: bool) -> Any:
    def run() -> None:
        if cuda.capturing is in_capture:
            raise RuntimeError("the cause")

    return run


def test_the_cause_of_a_failed_record_is_said_on_the_stream_that_was_there(cuda: _Cuda) -> None:
    here = cuda.current
    with pytest.raises(RuntimeError, match="the cause"):
        CudaRecorder().record(_fails(cuda, in_capture=True))
    assert cuda.current is here


def test_work_that_fails_before_its_record_is_waited_for(cuda: _Cuda) -> None:
    """What it has begun still writes where the next step writes."""
    here = cuda.current
    with pytest.raises(RuntimeError, match="the cause"):
        CudaRecorder().record(_fails(cuda, in_capture=False))
    assert len(here.waits_for) == 1


def test_records_after_a_failed_one_take_the_first_ones_pool(cuda: _Cuda) -> None:
    recorder = CudaRecorder()
    recorder.record(lambda: None)
    first = recorder._first
    with pytest.raises(RuntimeError):
        recorder.record(_fails(cuda, in_capture=True))
    recorder.record(lambda: None)
    assert cuda.pools == [None, first.pool()]
    assert recorder._first is first, "whose memory would be given back, and its pool with it"


def test_records_and_what_runs_before_them_are_on_one_stream(cuda: _Cuda) -> None:
    """Each that cuBLAS is called on keeps 32 MiB or more, and what it takes inside of a record is the record's."""
    recorder, streams, here = CudaRecorder(), list[_Stream](), cuda.current
    for _ in range(2):
        recorder.record(lambda: streams.append(cuda.current))
    assert len(streams) == 4
    assert len(set(streams)) == 1
    assert here not in streams
    assert cuda.current is here
