"""Being asked to stop: the first SIGINT or SIGTERM is a request, the second one ends this process.

Owns: noticing signals while a run trains. Does not own: what is done about a request (`train.trainer`), signals before
training has begun and those that reach the launcher (`train.launch`, `train.edge`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

_ASKING = (signal.SIGINT, signal.SIGTERM)
# A signal to all processes of a job comes to a rank twice, directly and from its launcher: that is one request.
_ONE_REQUEST_S = 0.3


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.is_asked = False


@contextlib.contextmanager
def noticing_signals(end: Callable[[int], None], *, is_lost: Callable[[], bool]) -> Iterator[StopRequest]:
    """Inside the block signals are noticed.

    end: called with the number of a second one, to end this process at once; of the first one where `is_lost()`: the
    run has failed elsewhere, and the launcher ends what is left.

    A thread reads them from a pipe: Python's own handlers wait until a collective has returned, and one that waits for
    a rank that hangs does not return.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread can handle signals
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # as set_wakeup_fd demands

    def listen() -> None:
        asked_at = 0.0
        while number := reader.recv(1)[0]:
            if number not in _ASKING:
                continue
            if is_lost() or (request.is_asked and time.monotonic() - asked_at > _ONE_REQUEST_S):
                end(number)
            if not request.is_asked:
                request.is_asked, asked_at = True, time.monotonic()

    thread = threading.Thread(target=listen, daemon=True, name="signals")
    # What is ignored stays so, as SIGINT in a script's background job.
    before = {number: handler for number in _ASKING if (handler := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda *_: None)
    old = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(writer.fileno(), b"\0")
        thread.join()
        reader.close()
        writer.close()
