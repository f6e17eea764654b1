"""Starting ranks on this machine with torch's elastic launcher, and saying which rank failed first.

Owns: the child processes of `--nproc N`, and how a rank that fails leaves word. Does not own: what ranks do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshlora.errors import MeshloraError, RankFailedError, UserError
from meshlora.parallel.groups import launcher_place

# Messages of gloo and NCCL when a peer is gone: the consequence of a failure elsewhere, never its cause.
LOST_CONTACT = "lost contact with another rank, whose own message names the cause"
_LOST_PEER = (
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


def launch(arguments: Sequence[str], *, nproc: int) -> None:
    """Run `python -m meshlora ARGUMENTS` as `nproc` ranks; returns when all have ended well.

    When one rank fails the launcher ends the others.

    Raises:
        RankFailedError: the first rank that failed, with its cause; `exit_code` is that rank's.
        KeyboardInterrupt, MeshloraError: SIGINT or another signal came; the ranks have been ended first.
    """
    logging.disable(logging.CRITICAL)  # this process only waits from here; what torch logs is said better below
    os.environ["MESHLORA_LAUNCHED"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id="meshlora",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, entrypoint=sys.executable)("-m", "meshlora", *arguments)
    except ChildFailedError as error:
        raise _first_cause(error) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        ended = MeshloraError(f"ended by signal {error.sigval:d} ({error.sigval.name})")
        ended.exit_code = 128 + error.sigval
        raise ended from None


def _first_cause(error: ChildFailedError) -> RankFailedError:
    """The failure to show: a rank's own word, then a killed rank, then one that lost its peers; of equals the first.

    torch stores whole seconds, and a rank loses its peers within the second in which the first one fails.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        rank, failure = item
        lost = _message(failure.message) == LOST_CONTACT
        # SIGTERM is what the launcher itself ends the others with.
        kind = 3 if failure.exitcode == -signal.SIGTERM else 2 if lost else int(failure.exitcode < 0)
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

    At once, without closing process groups: closing them can wait for ranks that wait for us.
    """
    try:
        yield
    except KeyboardInterrupt:
        _end(130)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        place = launcher_place()
        rank = place.rank if place else 0
        text = describe(error)
        leave_word(text)
        if not launched_by_us():
            if rank > 0 and isinstance(error, UserError):
                # Every rank finds the same mistake, and the launcher ends the others when the first one ends: rank 0
                # is given the time to say it. Who is still alive afterwards is alone with it.
                time.sleep(_RANK_0_FIRST_S)
            print(f"error: {'' if isinstance(error, UserError) else f'rank {rank}: '}{text}", file=sys.stderr)
        _end(error.exit_code if isinstance(error, MeshloraError) else 1)


def describe(error: BaseException) -> str:
    """What to say of an error: its message where we raised it on purpose, else with the traceback."""
    if isinstance(error, MeshloraError):
        return str(error)
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_PEER):
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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
