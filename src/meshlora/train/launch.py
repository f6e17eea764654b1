"""Starting ranks on this machine with torch's elastic launcher, and saying which rank failed first.

Owns: the child processes of `--nproc N`, how a rank that fails leaves word, and how a signal to this process ends what
it has started. Does not own: what ranks do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshlora.errors import MeshloraError, RankFailedError, UserError
from meshlora.parallel.groups import launcher_place

# Messages of gloo and NCCL when a peer is gone: the consequence of a failure elsewhere, never its cause.
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
_RANK_0_FIRST_S = 5.0
# Names the folder in which ranks say that they train.
_IN_TRAINING = "MESHLORA_IN_TRAINING"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(arguments: Sequence[str], *, nproc: int, command: str = "") -> None:
    """Run `python -m meshlora ARGUMENTS` as `nproc` ranks; returns when all have ended well.

    When one rank fails the launcher ends the others. While all of them train a first SIGINT or SIGTERM is handed on to
    them, and they save and end well. command: by which the user started this, for ranks to say how to go on.

    Raises:
        RankFailedError: the first rank that failed, with its cause; `exit_code` is that rank's.
        KeyboardInterrupt, MeshloraError: SIGINT or another signal came; the ranks have been ended first.
    """
    logging.disable(logging.CRITICAL)  # this process only waits from here; what torch logs is said better below
    os.environ["MESHLORA_LAUNCHED"] = "1"
    os.environ["MESHLORA_COMMAND"] = command
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    with tempfile.TemporaryDirectory(prefix="meshlora-") as words:
        os.environ[_IN_TRAINING] = str(Path(words) / "in-training")
        Path(os.environ[_IN_TRAINING]).mkdir()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            logs_specs=DefaultLogsSpecs(log_dir=words),
            run_id="meshlora",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=0,
            monitor_interval=0.1,
            signals_to_handle="SIGHUP,SIGQUIT",  # the others are handled here
        )
        try:
            with _first_signal_handed_on(Path(os.environ[_IN_TRAINING]), nproc):
                elastic_launch(config, entrypoint=sys.executable)("-m", "meshlora", *arguments)
        except ChildFailedError as error:
            raise _first_cause(error) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise _ended_by(error.sigval) from None


@contextlib.contextmanager
def _first_signal_handed_on(folder: Path, nproc: int) -> Iterator[None]:
    """Inside the block the first SIGINT or SIGTERM goes to the ranks, where all train; any other ends the launch."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    asking = (signal.SIGINT, signal.SIGTERM)
    before = {number: handler for number in asking if (handler := signal.getsignal(number)) is not signal.SIG_IGN}
    handed_on: list[int] = []

    def handle(number: int, _: object) -> None:
        ranks = [int(file.name) for file in folder.iterdir()]
        if handed_on or len(ranks) < nproc:
            raise SignalException(f"signal {number}", signal.Signals(number))
        handed_on.append(number)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(rank, number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say_in_training() -> None:
    """Tell our launcher that this rank handles signals from here on: by a file with its process' number."""
    if folder := os.environ.get(_IN_TRAINING):
        (Path(folder) / str(os.getpid())).touch()


def another_rank_failed() -> bool:
    """Whether a rank of this machine has left word of a failure."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return file is not None and any(Path(file).parent.parent.glob(f"*/{Path(file).name}"))


def log_to_file(output: Path, rank: int, *, goes_on: bool) -> None:
    """Send what this process says to `OUTPUT/logs/rank-N.log`. goes_on: after what is there already.

    Where the file cannot be made, as on a full disk, it stays on the terminal.
    """
    with contextlib.suppress(OSError):
        (output / "logs").mkdir(parents=True, exist_ok=True)
        with (output / "logs" / f"rank-{rank}.log").open("ab" if goes_on else "wb") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())


def how_to_go_on(words: str) -> str:
    """The command by which the run that `words` started goes on from its last checkpoint."""
    given, kept = shlex.split(os.environ.get("MESHLORA_COMMAND") or words), []
    while given:
        word = given.pop(0)
        if word == "--resume":
            given = given[1:]
        elif not word.startswith("--resume="):
            kept.append(word)
    command = shlex.join([*kept, "--resume", "auto"])
    return command if launched_by_us() or launcher_place() is None else f"{command}   (with the same launcher)"


def end_at_once(number: int) -> None:
    """End this process by a second signal. What a save has begun stays under a temporary name, for the next run."""
    place = launcher_place()
    if number == signal.SIGINT and not launched_by_us() and (place is None or place.rank == 0):
        print("interrupted", file=sys.stderr)
    _end(128 + number)


@contextlib.contextmanager
def signals_end_what_was_started() -> Iterator[None]:
    """Inside the block the first SIGINT, SIGTERM or SIGHUP raises; later ones wait until the block has cleaned up.

    Without it SIGTERM ends this process on the spot, and its ranks and temporary folders are left to themselves.

    Raises:
        KeyboardInterrupt, MeshloraError: SIGINT or another signal came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    # What is ignored stays so: SIGHUP under nohup, SIGINT in a script's background job.
    before = {number: handler for number in _ENDING if (handler := signal.getsignal(number)) is not signal.SIG_IGN}

    def first(number: int, _: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else _ended_by(signal.Signals(number))

    for number in before:
        signal.signal(number, first)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ended_by(number: signal.Signals) -> MeshloraError:
    ended = MeshloraError(f"ended by signal {number:d} ({number.name})")
    ended.exit_code = 128 + number
    return ended


def _first_cause(error: ChildFailedError) -> RankFailedError:
    """The failure to show: a rank's own word, then a killed rank, then one that lost its peers; of equals the first.

    torch stores whole seconds, and a rank loses its peers within the second in which the first one fails.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        rank, failure = item
        lost = _message(failure.message) == LOST_CONTACT
        # SIGTERM is what the launcher itself ends the others with; one in training then ends with 128 and its number.
        is_ended = failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)
        kind = 3 if is_ended else 2 if lost else int(failure.exitcode < 0)
        return kind, failure.timestamp, rank

    rank, failure = min(error.failures.items(), key=order)
    if failure.exitcode == UserError.exit_code:
        cause = RankFailedError(_message(failure.message))
        cause.exit_code = UserError.exit_code
    elif failure.exitcode < 0:
        cause = RankFailedError(f"rank {rank} was ended by signal {-failure.exitcode} ({failure.signal_name()})")
    else:
        cause = RankFailedError(f"rank {rank}: {_message(failure.message)}")
    return cause


def _message(message: object) -> str:
    """The text that `leave_word` stored, in whichever form torch hands it on."""
    if isinstance(message, dict):
        return str(message.get("message", message))
    return str(message)


@contextlib.contextmanager
def rank_edge() -> Iterator[None]:
    """The edge of a rank's process: an error is said once, left for the launcher, and ends this process at once.

    At once, without closing process groups: closing them can wait for ranks that wait for us. It is said on the
    terminal, and in the log of a rank that has one.
    """
    terminal = os.dup(2)
    try:
        yield
    except KeyboardInterrupt:
        place = launcher_place()
        if not launched_by_us() and (place is None or place.rank == 0):
            print("interrupted", file=sys.stderr)
        _end(130)
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
                # Every rank finds the same mistake, or misses the one that ended, and the launcher ends the others when
                # the first one ends: rank 0 is given the time to say it. Who is still alive then is alone with it.
                time.sleep(_RANK_0_FIRST_S)
            if is_logged:
                os.write(terminal, f"{line}\n".encode())
            else:
                print(line, file=sys.stderr, flush=True)
        _end(error.exit_code if isinstance(error, MeshloraError) else 1)
    finally:
        os.close(terminal)


def describe(error: BaseException) -> str:
    """What to say of an error: its message where we raised it on purpose, else with the traceback."""
    if isinstance(error, MeshloraError):
        return str(error)
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PEER):
        return LOST_CONTACT
    return "".join(traceback.format_exception(error)).rstrip()


def leave_word(text: str) -> None:
    """Store the cause where torch's launcher looks for it: it shows the one with the earliest time."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    content = {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps(content), encoding="utf-8")


def launched_by_us() -> bool:
    """Whether our own launcher is the parent: it has made all checks, and will say the first cause itself."""
    return os.environ.get("MESHLORA_LAUNCHED") == "1"


def _end(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)
