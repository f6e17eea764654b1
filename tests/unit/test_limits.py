"""What takes too long is ended, and the caller's own alarm is kept."""

from __future__ import annotations

import gc
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from meshlora_ground.limits import OutOfTimeError, time_limit


def _forever() -> None:
    while True:
        pass


def _hopeless_pattern() -> None:
    re.fullmatch("(.+)+(.+)+(.+)+(.+)+zzzz$", "model.layers.0.self_attn.q_proj")


def _much_garbage() -> None:
    while True:
        for _ in range(1000):
            circle: list[object] = []
            circle.append(circle)


class _Finalized:
    def __del__(self) -> None:
        time.sleep(0.3)  # Python ignores what is raised in here


def _slow_finalizer() -> None:
    _Finalized()
    _forever()


@pytest.fixture
def collector() -> Iterator[None]:
    """A collector of garbage that takes most of the time, in a callback, which loses what is raised in it."""
    gc.callbacks.append(lambda *_: time.sleep(0.001))
    yield
    gc.callbacks.pop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_block_is_ended_though_a_finalizer_loses_the_error() -> None:
    test_block_is_ended(_slow_finalizer)


@pytest.mark.usefixtures("collector")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_block_is_ended_and_never_in_the_collector_of_garbage() -> None:
    test_block_is_ended(_much_garbage)
    assert gc.isenabled()


@pytest.mark.parametrize("work", [_forever, _hopeless_pattern])
def test_block_is_ended(work: object) -> None:
    begun = time.monotonic()
    with pytest.raises(OutOfTimeError), time_limit(0.2):
        work()  # type: ignore[operator]
    assert time.monotonic() - begun < 2
    time.sleep(0.3)  # no alarm is left


def test_alarm_of_the_caller_goes_on() -> None:
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    old = signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with time_limit(5):
            time.sleep(0.1)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 0.25
        time.sleep(0.4)
        assert rang == [1]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *old)


def test_other_threads_are_not_limited() -> None:
    done = []

    def work() -> None:
        with time_limit(0.01):
            time.sleep(0.1)
        done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]
