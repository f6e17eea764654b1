"""The edge of a rank's process: incoming signals, and how its end is reported.

Owns: signals in training: the first SIGINT or SIGTERM is a request to stop, the second ends this process; the last line
of a rank, its reports to its launcher (ours or torchrun), its log, and its exit. Does not own: the launcher
(`train.launch`), the response to a request (`train.trainer`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshlora.comm.groups import launcher_place
from meshlora.common.errors import MeshloraError, UserError, report

# Messages of sockets, gloo and NCCL when a peer is gone: always the effect of a failure elsewhere.
LOST_CONTACT = "lost contact with another rank, whose own message names the cause"
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Socket closed",
    "remote process exited",
    "failed to connect",
    "Timed out waiting",
)
# Variables set by our own launcher: its pid; the user's command; the file descriptor of a socket for reports.
LAUNCHER, COMMAND, WORDS = "MESHLORA_LAUNCHER", "MESHLORA_COMMAND", "MESHLORA_WORDS"
_RANK_0_FIRST_S = 5.0
_ASKING = (signal.SIGINT, signal.SIGTERM)
# A signal to all processes of a job reaches a rank twice, directly and from its launcher: this is one request.
_ONE_REQUEST_S = 0.3


def launched_by_us() -> bool:
    """Whether our own launcher is the parent: it has done all checks, and reports the first cause itself."""
    return LAUNCHER in os.environ


def say_in_training() -> None:
    """Tell our launcher that this rank handles signals from now on."""
    _tell(trains=True)


def leave_result(result: Any) -> None:
    """Send JSON values to our launcher, which returns those of rank 0."""
    _tell(result=result)


def _tell(**words: Any) -> None:
    place, descriptor = launcher_place(), os.environ.get(WORDS)
    if descriptor is None or place is None:
        return
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as end:
        end.send(json.dumps({"rank": place.rank, **words}).encode())


def _another_rank_failed() -> bool:
    """Whether a rank of this machine has reported a failure to torchrun, which then ends the others."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return file is not None and any(Path(file).parent.parent.glob(f"*/{Path(file).name}"))


def log_to_file(output: Path, rank: int, *, goes_on: bool) -> None:
    """Redirect output of this process to `OUTPUT/logs/rank-N.log`. goes_on: append to the file.

    If the file cannot be made, as on a full disk, output stays on the terminal.
    """
    with contextlib.suppress(OSError):
        (output / "logs").mkdir(parents=True, exist_ok=True)
        with (output / "logs" / f"rank-{rank}.log").open("ab" if goes_on else "wb") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())


def how_to_go_on(words: str) -> str:
    """The command that resumes the run that `words` started."""
    given, kept = shlex.split(os.environ.get(COMMAND) or words), []
    while given:
        word = given.pop(0)
        if word == "--resume":
            given = given[1:]
        elif not word.startswith("--resume="):
            kept.append(word)
    command = shlex.join([*kept, "--resume", "auto"])
    return command if launched_by_us() or launcher_place() is None else f"{command}   (with the same launcher)"


@contextlib.contextmanager
def handling_signals(numbers: Collection[int], handler: Callable[[int, Any], None]) -> Iterator[Mapping[int, Any]]:
    """Inside the block `handler` gets the signals `numbers`; yields the previous handlers.

    Ignored signals stay ignored, as SIGHUP under nohup, and SIGINT in a script's background job. Outside of the main
    thread, which alone can handle signals, nothing is handled or yielded.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    known = {number: signal.getsignal(number) for number in numbers if in_main_thread}
    before = {number: handled for number, handled in known.items() if handled is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield before
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


@contextlib.contextmanager
def noticing_signals() -> Iterator[threading.Event]:
    """Yields an event that is set once this process is asked to stop. If another rank has failed, and the launcher
    ends the rest, already the first signal ends this process.

    A thread reads signals from a socket: Python's own handlers run only when a collective has returned, and one that
    waits for a hanging rank never does.
    """
    asked = threading.Event()
    with handling_signals(_ASKING, lambda *_: None) as handled:
        if not handled:
            yield asked
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)  # as set_wakeup_fd demands

        def listen() -> None:
            asked_at = 0.0
            while number := reader.recv(1)[0]:
                if number not in _ASKING:
                    continue
                if _another_rank_failed() or (asked.is_set() and time.monotonic() - asked_at > _ONE_REQUEST_S):
                    _end_by(number)
                if not asked.is_set():
                    asked_at = time.monotonic()
                    asked.set()

        thread = threading.Thread(target=listen, daemon=True, name="signals")
        with reader, writer:
            old = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            thread.start()
            try:
                yield asked
            finally:
                signal.set_wakeup_fd(old)
                os.write(writer.fileno(), b"\0")
                thread.join()


def _end_by(number: int) -> None:
    """End this process after a signal. An unfinished save stays under a temporary name, for the next run to remove."""
    place = launcher_place()
    if number == signal.SIGINT and not launched_by_us() and (place is None or place.rank == 0):
        print("interrupted", file=sys.stderr)
    _end(128 + number)


@contextlib.contextmanager
def rank_edge() -> Iterator[None]:
    """The edge of a rank's process: an error is printed once, reported to the launcher, and ends this process.

    Process groups are not closed first: closing can wait for ranks that wait for us. The error goes to the terminal,
    and to the rank's log if it has one.
    """
    terminal = os.dup(2)
    try:
        yield
    except KeyboardInterrupt:
        _end_by(signal.SIGINT)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        place = launcher_place()
        rank = place.rank if place else 0
        text = describe(error)
        leave_word(text)
        line = f"error: {'' if isinstance(error, UserError) else f'rank {rank}: '}{text}"
        is_logged = not os.path.sameopenfile(2, terminal)
        if is_logged:
            print(line, file=sys.stderr, flush=True)
        if not launched_by_us():
            if rank > 0 and (isinstance(error, UserError) or text == LOST_CONTACT):
                # All ranks find the same mistake, or lose the same peer, and the launcher kills the rest when the first
                # ends: give rank 0 the time to print it. A rank still alive after that is the only one with the error.
                time.sleep(_RANK_0_FIRST_S)
            if is_logged:
                os.write(terminal, f"{line}\n".encode())
            else:
                print(line, file=sys.stderr, flush=True)
        _end(error.exit_code if isinstance(error, MeshloraError) else 1)
    finally:
        os.close(terminal)


def describe(error: BaseException) -> str:
    """The text for an error: the message of one of ours, else the traceback."""
    if isinstance(error, MeshloraError):
        return str(error)
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PEER):
        return LOST_CONTACT
    return report("".join(traceback.format_exception(error)).rstrip())


def leave_word(text: str) -> None:
    """Report the cause of this rank's end to its launcher: ours, or torchrun, which shows the earliest."""
    _tell(failed=text)
    if not (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    content = {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps(content), encoding="utf-8")


def _end(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader may be gone
            stream.flush()
    os._exit(code)
