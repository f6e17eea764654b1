"""What takes too long is ended, and the caller's own alarm is kept."""

from __future__ import annotations

import re
import signal
import threading
import time

import pytest

from meshlora.common.limits import OutOfTimeError, time_limit


def _forever() -> None:
    while True:
        pass


def _hopeless_pattern() -> None:
    re.fullmatch("(.+)+(.+)+(.+)+(.+)+zzzz$", "model.layers.0.self_attn.q_proj")


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
