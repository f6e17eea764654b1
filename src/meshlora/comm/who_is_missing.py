"""Arrivals at collectives: which ranks are missing when one has waited too long.

Owns: the count of collectives that this rank has entered, per group; publishing it in the job's store, every few
seconds from a thread; finding the ranks that did not arrive. Does not own: the collectives (`comm.collectives`), the
store and the time limit of groups (`comm.groups`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshlora.common.errors import CollectiveTimeoutError

# Seconds between two reports.
INTERVAL_S = 2.0
# gloo's words for a timeout, and ours. NCCL ends the process by itself and names the collective.
_TIMED_OUT = ("Timed out waiting", "timed out")

Ranks = tuple[int, ...]


@dataclass
class Arrivals:
    """The collectives that this rank has entered, and the current one. As a context manager: one collective.

    Attributes:
        entered: number of collectives, by the ranks of their group. name, ranks: of the last one; is_in: still in it.
        timeout_s, explain: set while reports are published; the time limit, and the message for a collective that
            exceeded it.
    """

    entered: dict[Ranks, int] = field(default_factory=dict)
    name: str = ""
    ranks: Ranks = ()
    is_in: bool = False
    timeout_s: float | None = None
    explain: Callable[[], str] | None = None

    def at(self, name: str, ranks: Ranks) -> Self:
        """Enter collective `name` over the global ranks `ranks`."""
        self.entered[ranks] = self.entered.get(ranks, 0) + 1
        self.name, self.ranks, self.is_in = name, ranks, True
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.explain is not None and isinstance(error, RuntimeError) and any(s in str(error) for s in _TIMED_OUT):
            raise CollectiveTimeoutError(self.explain()) from error
        self.is_in = False

    def words(self) -> str:
        """As JSON, for the other ranks."""
        counts = [[list(ranks), count] for ranks, count in self.entered.copy().items()]
        return json.dumps({"entered": counts, "name": self.name, "ranks": self.ranks, "is_in": self.is_in})

    @classmethod
    def read(cls, words: str) -> Arrivals:
        """Parse the `words` of another rank."""
        said = json.loads(words)
        entered = {tuple(ranks): count for ranks, count in said["entered"]}
        return cls(entered, said["name"], tuple(said["ranks"]), said["is_in"])


class Board:
    """A key-value store in a folder shared by all ranks: the methods of torch's store that are used here.

    torch's own file only grows, and ranks report for as long as they train; here overwriting frees the old value.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _file(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    def set(self, key: str, words: str) -> None:
        """Set `key` atomically: a reader sees the old words or the new ones."""
        try:
            new = self._file(f"{key}.new")
            new.write_text(words, encoding="utf-8")
            new.replace(self._file(key))
        except OSError as error:  # the folder disappears with the launcher
            raise RuntimeError(str(error)) from error

    def check(self, keys: list[str]) -> bool:
        """Whether all `keys` are set."""
        return all(self._file(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """The value of `key`."""
        return self._file(key).read_bytes()


@contextlib.contextmanager
def telling_the_others(
    arrivals: Arrivals, store: Any, *, rank: int, world: int, timeout_s: float, interval_s: float = INTERVAL_S
) -> Iterator[None]:
    """Inside the block this rank publishes its arrivals, and a collective that times out names the missing ranks.

    store: torch.distributed's or a `Board`, shared by all ranks. timeout_s: the time limit, for the message.
    """
    ended = threading.Event()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the store disappears with the rank or launcher that hosts it
            store.set(_key(rank), arrivals.words())

    def keep_telling() -> None:
        while not ended.wait(interval_s):
            tell()

    def explain() -> str:
        tell()
        time.sleep(2 * interval_s)  # by then every rank that can has reported after the time limit
        known = {rank: arrivals}
        for other in set(range(world)) - {rank}:
            with contextlib.suppress(RuntimeError, OSError):
                if store.check([_key(other)]):
                    known[other] = Arrivals.read(store.get(_key(other)).decode())
        return say_who_is_missing(known, rank, timeout_s=timeout_s)

    arrivals.explain, arrivals.timeout_s = explain, timeout_s
    tell()
    thread = threading.Thread(target=keep_telling, daemon=True, name="arrivals")
    thread.start()
    try:
        yield
    finally:
        arrivals.explain = arrivals.timeout_s = None
        ended.set()
        thread.join(timeout=interval_s)


def say_who_is_missing(known: dict[int, Arrivals], rank: int, *, timeout_s: float) -> str:
    """Why `rank` waits in vain. known: each rank's last report; absent for a rank that never reported.

    A rank that is missing because it waits elsewhere for a third one is not the cause: the third one is.
    """
    waits = known[rank]
    looked_at: set[int] = set()
    missing = _not_arrived(known, rank)
    while waiting := [one for one in sorted(missing - looked_at) if one in known and known[one].is_in]:
        looked_at.update(waiting)
        behind = set().union(*(_not_arrived(known, one) for one in waiting)) - {rank}
        if behind - missing:
            missing = (missing - set(waiting)) | behind
    which = f"{waits.name} over {_words(waits.ranks)} (number {waits.entered.get(waits.ranks, 0)} of this group)"
    if not missing:
        return f"{which} did not end in {timeout_s:g} s, though all ranks came: is the network well?"
    last = [
        f"rank {one} was last in {known[one].name} over {_words(known[one].ranks)}"
        if one in known and known[one].name
        else f"rank {one} said nothing"
        for one in sorted(missing)
    ]
    return (
        f"{which} was given up after {timeout_s:g} s (train.timeout_s): {_words(tuple(sorted(missing)))} did not "
        f"arrive; {', '.join(last)}"
    )


def _not_arrived(known: dict[int, Arrivals], rank: int) -> set[int]:
    """Ranks of the group in which `rank` waits that entered fewer of its collectives."""
    waits = known[rank]
    number = waits.entered.get(waits.ranks, 0)
    return {one for one in waits.ranks if one not in known or known[one].entered.get(waits.ranks, 0) < number} - {rank}


def _words(ranks: Ranks) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def _key(rank: int) -> str:
    return f"meshlora/arrivals/{rank}"
