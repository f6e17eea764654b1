"""The watch of a rank: a thread that looks into the job's store every few seconds.

Owns: the first cause of a job's end, told to all ranks; noticing a rank of this machine that ended without a word;
answering a rank that asks where the others are. Does not own: what a rank does when the job ends (`run.edge`), the
words on missing ranks (`processes.who_is_missing`), the store (`comm.groups`).

A backend on GPUs does not notice a peer's end: its kernels wait until their time limit. So whoever fails says so in the
store, and the others look. One question a rank every two seconds, of a fixed size: below 1 MB/s at 16,384 ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Seconds between two looks, of jobs of up to `_MANY` ranks; more ranks look less often.
INTERVAL_S, _MANY = 2.0, 8192
# So many looks in a row without an answer: the store is gone, and with it the machine that held it.
_LOOKS_WITHOUT_ANSWER = 4
# After so long without a sign of life a machine counts as gone. Far above any pause of a living one.
SILENT_S = 120.0
# Between two looks of a rank that lost another one, and waits for the cause.
_OFTEN_S = 0.1
_BOOT, _PIDS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
# Set once there is anything to read: most looks ask for this key alone.
_NEWS, _ABORT, _ASKED = "m/n", "m/abort", "m/asked"
_DONE, _BEAT, _ANSWER = "m/done/{}", "m/beat/{}", "m/at/{}"  # of a rank


class BoardInFolder:
    """A board in a folder shared by all ranks: torch's own file store only grows, and here the old value goes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _file(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    def set(self, key: str, words: str) -> None:
        """Set `key` atomically: a reader sees the old words or the new ones."""
        with _as_runtime_error():
            self._written(key, words).replace(self._file(key))

    def check(self, key: str) -> bool:
        """Whether `key` is set."""
        return self._file(key).exists()

    def get(self, key: str) -> str:
        """The words of `key`."""
        with _as_runtime_error():
            return self._file(key).read_text(encoding="utf-8")

    def claim(self, key: str, words: str) -> str:
        """Set `key` if nobody has; returns the words of whoever was first."""
        with _as_runtime_error():
            new = self._written(key, words)
            with contextlib.suppress(FileExistsError):
                os.link(new, self._file(key))  # atomic, and fails where there is one
            new.unlink()
        return self.get(key)

    def _written(self, key: str, words: str) -> Path:
        new = self._file(f"{key}.new-{os.getpid()}-{threading.get_ident()}")
        new.write_text(words, encoding="utf-8")
        return new


@contextlib.contextmanager
def _as_runtime_error() -> Any:
    try:
        yield
    except OSError as error:  # the folder disappears with the launcher
        raise RuntimeError(str(error)) from error


class BoardInStore:
    """A board in torch's store of the job, over a connection of its own: a wait on the first holds that one."""

    def __init__(self, store: Any) -> None:
        self._store = store.clone()

    def set(self, key: str, words: str) -> None:
        """Set `key`."""
        self._store.set(key, words)

    def check(self, key: str) -> bool:
        """Whether `key` is set."""
        return bool(self._store.check([key]))

    def get(self, key: str) -> str:
        """The words of `key`, which is set."""
        return str(self._store.get(key).decode())

    def claim(self, key: str, words: str) -> str:
        """Set `key` if nobody has; returns the words of whoever was first."""
        return str(self._store.compare_set(key, "", words).decode())


Board = BoardInFolder | BoardInStore  # words shared by all ranks, by key


@dataclass(frozen=True)
class Cause:
    """Why a job ends.

    Attributes:
        rank, host, text: who failed first, on which machine, and its words. code: the exit code of all ranks.
        by, machine: the rank that says so, another than `rank` if that one cannot; and its machine (`this_machine`).
    """

    rank: int
    host: str
    text: str
    code: int
    by: int
    machine: str


@dataclass(frozen=True)
class Post:
    """What a rank's watch looks after.

    Attributes:
        pids: process ids of this machine, by rank. next_machine, next_host: the first rank of another machine, for its
            signs of life, and the name of that. is_first: whether this rank is the first of its machine.
    """

    pids: Mapping[int, int] = field(default_factory=dict)
    next_machine: int | None = None
    next_host: str = ""
    is_first: bool = False


class Watch:
    """The watch of rank `rank`; as a context manager: the thread runs inside the block.

    Attributes:
        post: what this rank looks after.
        speaks: whether this rank prints the job's end for its machine.
        told: called by the thread with the first cause; None: nothing is done.
        answer: what this rank says to one that asks where the others are (`who_is_missing`).
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        *,
        world: int,
        speaks: bool = False,
        told: Callable[[Cause, Watch], None] | None = None,
        interval_s: float | None = None,
    ) -> None:
        self.board, self.rank, self.speaks, self.told = board, rank, speaks, told
        self.interval_s = interval_s if interval_s is not None else INTERVAL_S * max(1.0, world / _MANY)
        self.machine, self.post, self.neighbours = this_machine(), Post(), dict[int, int]()
        self.answer: Callable[[], str] | None = None
        self.ending = threading.Lock()  # held by whoever ends this process
        self._answered, self._unanswered, self._ended = "", 0, threading.Event()
        self._beats, self._last_beat = 0, ("", 0.0)
        self._looked_at = time.monotonic()
        self._threads = [
            threading.Thread(target=work, daemon=True, name="watch") for work in (self._keep_looking, self._keep_time)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if error is None:
            with contextlib.suppress(RuntimeError):  # the store may be gone: rank 0 has ended
                self.board.set(_DONE.format(self.rank), "1")
        for thread in self._threads:
            thread.join(timeout=self.interval_s)

    def looks_after(self, post: Post) -> None:
        """From now on."""
        self.post, self.neighbours, self.speaks = post, dict(post.pids), post.is_first

    def abort(self, text: str, *, code: int, rank: int | None = None, host: str | None = None) -> Cause:
        """End the job: tell all ranks. Returns its first cause, which is another rank's if that was first.

        rank, host: who failed, if not this rank.
        """
        failed = self.rank if rank is None else rank
        own = Cause(failed, host or socket.gethostname(), text, code, self.rank, self.machine)
        try:
            first = Cause(**json.loads(self.board.claim(_ABORT, json.dumps(asdict(own)))))
            self.board.set(_NEWS, "1")
        except RuntimeError:  # nobody is left to be told
            return own
        return first

    def first_cause(self, *, wait_s: float) -> Cause | None:
        """The first cause of the job's end, if one comes within `wait_s` seconds; or that its store is gone."""
        deadline = time.monotonic() + wait_s
        try:
            while (cause := self.look()) is None and time.monotonic() < deadline:
                time.sleep(_OFTEN_S)
        except RuntimeError:
            return _GONE
        return cause

    def ask(self) -> None:
        """Ask all ranks to publish their answers; those that can have done so two intervals later."""
        self.board.set(_ASKED, f"{self.rank} {time.monotonic()}")
        self.board.set(_NEWS, "1")

    def answer_of(self, rank: int) -> str | None:
        """The last answer of `rank`, if it gave any."""
        key = _ANSWER.format(rank)
        with contextlib.suppress(RuntimeError):
            if self.board.check(key):
                return self.board.get(key)
        return None

    def tell(self) -> None:
        """Publish this rank's answer."""
        if self.answer is not None:
            self.board.set(_ANSWER.format(self.rank), self.answer())

    def _keep_looking(self) -> None:
        while not self._ended.wait(self.interval_s):
            try:
                cause = self.look()
                self._unanswered, self._looked_at = 0, time.monotonic()
            except RuntimeError:
                self._unanswered += 1
                if self._unanswered < _LOOKS_WITHOUT_ANSWER:
                    continue
                cause = _GONE
            if cause is not None and self.told is not None and not self._ended.is_set():
                self.told(cause, self)
                return

    def _keep_time(self) -> None:
        """A store whose machine lost its power does not answer, and no look returns: end the job all the same."""
        while not self._ended.wait(self.interval_s):
            if time.monotonic() - self._looked_at > SILENT_S and self.told is not None:
                self.told(_GONE, self)
                return

    def look(self) -> Cause | None:
        """One look: answer who asks; the job's first cause, if there is one, or if a neighbour has ended."""
        if self.board.check(_NEWS):
            if self.board.check(_ABORT):
                return Cause(**json.loads(self.board.get(_ABORT)))
            if self.board.check(_ASKED) and (asked := self.board.get(_ASKED)) != self._answered:
                self._answered = asked
                self.tell()
        for rank, pid in list(self.neighbours.items()):
            if is_running(pid):
                continue
            if self.board.check(_DONE.format(rank)):
                self.neighbours.pop(rank, None)
            else:
                return self.abort("it ended without a word, as by SIGKILL or for lack of memory", code=1, rank=rank)
        return self._silent_machine()

    def _silent_machine(self) -> Cause | None:
        """The end of the job, if the next machine has given no sign of life for too long."""
        if (rank := self.post.next_machine) is None:
            return None
        self._beats += 1
        self.board.set(_BEAT.format(self.rank), str(self._beats))
        key, now = _BEAT.format(rank), time.monotonic()
        beat = self.board.get(key) if self.board.check(key) else ""
        if beat != self._last_beat[0] or not self._last_beat[1]:
            self._last_beat = beat, now
        if now - self._last_beat[1] < SILENT_S or self.board.check(_DONE.format(rank)):
            return None
        text = f"its machine has given no sign of life for {SILENT_S:g} s"
        return self.abort(text, code=1, rank=rank, host=self.post.next_host)


_GONE = Cause(
    0, "", "the store of the job does not answer, and with it the process or machine that holds it is gone", 1, -1, ""
)


def this_machine() -> str:
    """Names this machine, and the processes that see each other's ids: the same host name may be given twice."""
    known = [socket.gethostname()]
    for read in (_BOOT.read_text, lambda: os.readlink(_PIDS)):
        try:
            known.append(read().strip())
        except OSError:  # not on Linux
            known.append("")
    return " ".join(known)


def is_running(pid: int) -> bool:
    """Whether process `pid` of this machine runs; a zombie does not."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        pass
    if stat.parent.parent.joinpath("self").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
