"""Arrivals at collectives: which ranks are missing when one has waited too long.

Owns: the count of collectives that this rank has entered, per group; its answer to a rank that asks; finding the ranks
that did not arrive. Does not own: the collectives (`comm.collectives`), how ranks ask each other
(`processes.heartbeat`), the time limit of groups (`comm.groups`).

Answers have a fixed size: a group is named by the number of its partition of the ranks, not by its members.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from meshlora.processes.heartbeat import Watch
from meshlora_ground.errors import CollectiveTimeoutError

# Of more ranks only the first are named.
_NAMED = 16
_EXPLAINS, _EXPLAINED = "m/explains", "m/explained"
# gloo's words for a timeout, and ours. NCCL ends the process by itself and names the collective.
_TIMED_OUT = ("Timed out waiting", "timed out")

Ranks = tuple[int, ...]
Partition = Sequence[Ranks]  # groups without a common rank


@dataclass
class Arrivals:
    """The collectives that this rank has entered, and the current one. As a context manager: one collective.

    Attributes:
        entered: number of collectives, by the ranks of their group. name, ranks: of the last one; is_in: still in it.
        partitions: the groups of each axis, the same on all ranks, in the order in which they were opened.
        timeout_s, explain: set while reports are published; the time limit, and the message for a collective that
            exceeded it.
    """

    entered: dict[Ranks, int] = field(default_factory=dict)
    name: str = ""
    ranks: Ranks = ()
    is_in: bool = False
    partitions: list[Partition] = field(default_factory=list, repr=False, compare=False)
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

    def words(self, rank: int) -> str:
        """As JSON, for the other ranks; `rank` is this one."""
        own = [_group_of(rank, partition) for partition in self.partitions]
        counts = [self.entered.get(ranks, 0) for ranks in own]
        now = own.index(self.ranks) if self.ranks in own else None
        return json.dumps({"entered": counts, "name": self.name, "now": now, "is_in": self.is_in})

    @classmethod
    def read(cls, words: str, rank: int, partitions: list[Partition]) -> Arrivals:
        """Parse the `words` of `rank`."""
        said = json.loads(words)
        own = [_group_of(rank, partition) for partition in partitions]
        entered = {ranks: count for ranks, count in zip(own, said["entered"], strict=True) if ranks and count}
        now = () if said["now"] is None else own[said["now"]]
        return cls(entered, said["name"], now, said["is_in"], partitions)


def _group_of(rank: int, partition: Partition) -> Ranks:
    return next((ranks for ranks in partition if rank in ranks), ())


@contextlib.contextmanager
def explaining_timeouts(arrivals: Arrivals, watch: Watch, *, timeout_s: float) -> Iterator[None]:
    """Inside the block a collective that times out names the missing ranks.

    One rank of the job asks the others where they are; all show its words. timeout_s: the limit, for the message.
    """
    rank = watch.rank

    def look_up(other: int) -> Arrivals | None:
        if other == rank:
            return arrivals
        words = watch.answer_of(other)
        return None if words is None else Arrivals.read(words, other, arrivals.partitions)

    def explain() -> str:
        if watch.board.claim(_EXPLAINS, str(rank)) != str(rank):
            deadline = time.monotonic() + 4 * watch.interval_s
            while time.monotonic() < deadline:
                if watch.board.check(_EXPLAINED):
                    return watch.board.get(_EXPLAINED)
                time.sleep(watch.interval_s / 10)
        watch.ask()
        time.sleep(2 * watch.interval_s)
        text = say_who_is_missing(functools.cache(look_up), rank, timeout_s=timeout_s)
        return watch.board.claim(_EXPLAINED, text)

    arrivals.explain, arrivals.timeout_s = explain, timeout_s
    watch.answer = functools.partial(arrivals.words, rank)
    try:
        yield
    finally:
        arrivals.explain = arrivals.timeout_s = watch.answer = None


def say_who_is_missing(known: Callable[[int], Arrivals | None], rank: int, *, timeout_s: float) -> str:
    """Why `rank` waits in vain. known: a rank's answer; None for one that gave none.

    A rank that is missing because it waits elsewhere for a third one is not the cause: the third one is.
    """
    waits = known(rank)
    assert waits is not None
    looked_at: set[int] = set()
    missing = _not_arrived(known, waits, rank)
    while waiting := {one: said for one in sorted(missing - looked_at) if (said := known(one)) and said.is_in}:
        looked_at.update(waiting)
        behind = set().union(*(_not_arrived(known, said, one) for one, said in waiting.items())) - {rank}
        if behind - missing:
            missing = (missing - set(waiting)) | behind
    which = f"{waits.name} over {_words(waits.ranks)} (number {waits.entered.get(waits.ranks, 0)} of this group)"
    if not missing:
        return f"{which} did not end in {timeout_s:g} s, though all ranks came: is the network well?"
    last = [
        f"rank {one} was last in {said.name} over {_words(said.ranks)}"
        if (said := known(one)) and said.name
        else f"rank {one} said nothing"
        for one in sorted(missing)[:_NAMED]
    ]
    return (
        f"{which} was given up after {timeout_s:g} s (train.timeout_s): {_words(tuple(sorted(missing)))} did not "
        f"arrive; {', '.join(last)}"
    )


def _not_arrived(known: Callable[[int], Arrivals | None], waits: Arrivals, rank: int) -> set[int]:
    """Ranks of the group in which `rank` waits that entered fewer of its collectives."""
    number = waits.entered.get(waits.ranks, 0)
    others = {one: known(one) for one in waits.ranks if one != rank}
    return {one for one, said in others.items() if said is None or said.entered.get(waits.ranks, 0) < number}


def _words(ranks: Ranks) -> str:
    more = f" and {len(ranks) - _NAMED:,} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{more}"
