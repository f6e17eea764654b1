"""The edge of a rank's process: incoming signals, and how its end is reported.

Owns: signals in training: the first SIGINT or SIGTERM is a request to stop, the second ends this process; SIGUSR1 and
SIGUSR2 are requests however often they come; the last line of a rank, its reports to its launcher (ours or torchrun),
its log, and its exit. Does not own: the launcher (`run.launch`), the response to a request (`run.trainer`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from meshlora.comm.patience import board_of_job
from meshlora.processes.heartbeat import Cause, Watch
from meshlora.processes.launchers import launcher_place
from meshlora_ground.compat.torch_distributed import abort_groups
from meshlora_ground.errors import MeshloraError, UserError, report

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
# At a job's end: how long telling the others may take, and printing on a slow terminal.
_TELLING_S, _SPEAKING_S = 3.0, 1.0
# Schedulers send the last two some minutes before a time limit, where SIGTERM follows: only the first two may insist.
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
INSISTING = (signal.SIGINT, signal.SIGTERM)
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


def command_of(words: str) -> str:
    """The user's command, where `words` are those of this process."""
    return os.environ.get(COMMAND) or words


def how_to_go_on(words: str) -> str:
    """The command that resumes the run that `words` started."""
    command = shlex.join([*_without_resume(shlex.split(command_of(words))), "--resume", "auto"])
    return command if launched_by_us() or launcher_place() is None else f"{command}   (with the same launcher)"


def whole_command(command: str) -> str:
    """`command` without `--resume`: it trains the whole run, however often that was interrupted.

    A run that goes on despite a difference keeps it: no command alone trains its adapter.

    >>> whole_command("meshlora train run.yaml --resume auto --nproc 2")
    'meshlora train run.yaml --nproc 2'
    """
    words = shlex.split(command)
    is_changed = any(word.startswith("--resume-") for word in words)
    return command if is_changed else shlex.join(_without_resume(words))


def _without_resume(words: Sequence[str]) -> list[str]:
    given, kept = list(words), []
    while given:
        word = given.pop(0)
        if word == "--resume":
            given = given[1:]
        elif not word.startswith("--resume="):
            kept.append(word)
    return kept


def be_deterministic() -> None:
    """From now on this process computes the same bytes each time, or says which operation cannot. Before a GPU is used,
    on all ranks: NCCL reads its variables once, and ranks that differ in them do not fit together.

    https://docs.pytorch.org/docs/stable/notes/randomness.html; sums over ranks in one order for a given topology.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NCCL_PROTO", "Simple")
    torch.use_deterministic_algorithms(True)
    # A search for bugs, which costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


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
            if signal.getsignal(number) is handler:
                signal.signal(number, handled)


def hear_no_more() -> None:
    """Ignore SIGTERM, SIGUSR1 and SIGUSR2 to the end of this process, which the caller brings about.

    Launchers send SIGTERM to all ranks as soon as one has ended with another code than 0 (`srun --kill-on-bad-exit`, 20
    ms after the first), and would report those that tidy up as killed. What hangs they kill by SIGKILL some time later.
    """
    for number in {*ASKING} - {signal.SIGINT}:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def noticing_signals(watch: Watch | None = None) -> Iterator[threading.Event]:
    """Yields an event that is set once this process is asked to stop. If another rank has failed, and the launcher
    ends the rest, already the first signal ends this process. watch: tells the other ranks of such an end.

    A thread reads signals from a socket: Python's own handlers run only when a collective has returned, and one that
    waits for a hanging rank never does.
    """
    asked = threading.Event()
    with handling_signals(ASKING, lambda *_: None) as handled:
        if not handled:
            yield asked
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)  # as set_wakeup_fd demands

        def listen() -> None:
            asked_at: float | None = None  # by a signal that may insist
            while number := reader.recv(1)[0]:
                if number in INSISTING:
                    now, file = time.monotonic(), os.environ.get("TORCHELASTIC_ERROR_FILE")
                    # A rank of this machine has reported a failure to torchrun, which then ends the others.
                    if file is not None and any(Path(file).parent.parent.glob(f"*/{Path(file).name}")):
                        _end_by(number)
                    if asked_at is not None and now - asked_at > _ONE_REQUEST_S:
                        if watch is not None:
                            _within(_TELLING_S, functools.partial(_told_of_signal, watch, number))
                        _end_by(number)
                    asked_at = now if asked_at is None else asked_at
                if number in ASKING:
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
def rank_edge(*, is_watched: bool = False) -> Iterator[Watch | None]:
    """The edge of a rank's process: an error is printed once, reported to the launcher, and ends this process.

    Process groups are not closed first: closing can wait for ranks that wait for us. The error goes to the terminal,
    and to the rank's log if it has one.

    is_watched: under a launcher that is not ours all ranks, on all machines, end with the first that fails, and show
    its cause; yields the watch that sees to it. All ranks of the job call this.
    """
    terminal = os.dup(2)
    watch = None
    try:
        with contextlib.ExitStack() as held:
            place = launcher_place()
            if is_watched and place is not None and place.world > 1 and not launched_by_us():
                told = functools.partial(_end_with_job, terminal)
                watch = Watch(board_of_job(), place.rank, world=place.world, speaks=place.local_rank == 0, told=told)
                held.enter_context(watch)
                # The launcher ends the ranks of a machine as soon as one is gone, and one of them is to say why.
                held.enter_context(handling_signals((signal.SIGTERM,), _terminate))
            yield watch
    except (KeyboardInterrupt, _TerminatedError) as error:
        number = signal.SIGTERM if isinstance(error, _TerminatedError) else signal.SIGINT
        if watch is not None:
            _within(_TELLING_S, functools.partial(_told_of_signal, watch, number))
        _end_by(number)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        place = launcher_place()
        rank, text = place.rank if place else 0, describe(error)
        code = error.exit_code if isinstance(error, MeshloraError) else 1
        if watch is not None:
            # The launcher ends the ranks of a machine as soon as one is gone: first the cause is told.
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            # An effect of another rank's end, and a mistake that all find: that one's words come first.
            is_second = text == LOST_CONTACT or (rank > 0 and isinstance(error, UserError))
            found: list[Cause] = []

            def tell(watch: Watch = watch) -> None:
                first = watch.first_cause(wait_s=_RANK_0_FIRST_S) if is_second else None
                found.append(first or watch.abort(text, code=code))

            _within(_RANK_0_FIRST_S + _TELLING_S, tell)  # a store whose machine is gone may not even refuse
            own = Cause(rank, socket.gethostname(), text, code, rank, watch.machine)
            _end_with_job(terminal, found[0] if found else own, watch)
        leave_word(text)
        if not launched_by_us() and rank > 0 and isinstance(error, UserError):
            # All ranks find the same mistake, and the launcher kills the rest when the first ends: give rank 0 the time
            # to print it.
            time.sleep(_RANK_0_FIRST_S)
        line = f"error: {'' if isinstance(error, UserError) else f'rank {rank}: '}{text}"
        _print(line, terminal, only_in_log=launched_by_us())
        _end(code)
    finally:
        os.close(terminal)


class _TerminatedError(BaseException):
    """SIGTERM, before training, which takes it for a request."""


def _terminate(number: int, frame: Any) -> None:
    raise _TerminatedError


def _told_of_signal(watch: Watch, number: int) -> None:
    """Tell the other ranks that this one is ended by a signal, unless that is the effect of another one's end."""
    if watch.look() is None:
        watch.abort(f"it was ended by signal {number:d} ({signal.Signals(number).name})", code=128 + number)


def _end_with_job(terminal: int, cause: Cause, watch: Watch) -> None:
    """End this process as the job ends: with the first cause, printed once on each machine."""
    watch.ending.acquire()  # for good: its thread and the main one may come here both
    leave_word(cause.text)
    is_own = cause.by == watch.rank
    if is_own or (watch.speaks and cause.machine != watch.machine):
        who = "" if cause.code == UserError.exit_code or not cause.host else f"rank {cause.rank} ({cause.host}): "
        _print(f"error: {who}{cause.text}", terminal)
    if is_own or watch.rank == 0 or not watch.speaks:
        # The launcher ends the ranks of a machine when one has ended, and rank 0 or its agent may hold the store: first
        # let all read the words, and the one of each machine speak that does.
        time.sleep(watch.interval_s + _SPEAKING_S)
    _within(_TELLING_S, abort_groups)
    _end(cause.code)


def _print(line: str, terminal: int, *, only_in_log: bool = False) -> None:
    """Print `line` to the terminal, and to this rank's log if it has one."""
    is_logged = not os.path.sameopenfile(2, terminal)
    if is_logged or not only_in_log:
        print(line, file=sys.stderr, flush=True)
    if is_logged and not only_in_log:
        os.write(terminal, f"{line}\n".encode())


def _within(limit_s: float, act: Callable[[], object]) -> None:
    """Call `act`, and go on after `limit_s` seconds if it has not returned: this process ends."""
    thread = threading.Thread(target=act, daemon=True, name="last words")
    thread.start()
    thread.join(limit_s)


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
