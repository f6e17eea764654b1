"""Which ranks are missing when a collective has waited too long.

Owns: asking all ranks where they are, and finding from their answers those that did not arrive. Does not own: what a
rank answers (`processes.arrivals`), how ranks ask each other (`processes.heartbeat`), time limits (`comm.groups`).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator

from meshlora.processes.arrivals import Arrivals, Ranks
from meshlora.processes.heartbeat import Watch

# Of more ranks only the first are named.
_NAMED = 16
_EXPLAINS, _EXPLAINED = "m/explains", "m/explained"


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
        watch.ask()  # the others publish where they are
        time.sleep(2 * watch.interval_s)  # each rank looks once in an interval
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
    while todo := sorted(missing - looked_at):
        looked_at.update(todo)
        waiting: set[int] = set()
        behind: set[int] = set()
        for one in todo:
            said = known(one)
            if said is not None and said.is_in:
                waiting.add(one)
                behind |= _not_arrived(known, said, one)
        behind.discard(rank)
        if behind - missing:  # else they wait for each other alone, and all of them are named
            missing = (missing - waiting) | behind
    which = f"{waits.name} over {_words(waits.ranks)} (number {waits.entered.get(waits.ranks, 0)} of this group)"
    if not missing:
        return f"{which} did not end in {timeout_s:g} s, though all ranks came: is the network well?"
    last = [_last_of(one, known(one)) for one in sorted(missing)[:_NAMED]]
    return (
        f"{which} was given up after {timeout_s:g} s (train.timeout_s): {_words(tuple(sorted(missing)))} did not "
        f"arrive; {', '.join(last)}"
    )


def _last_of(rank: int, said: Arrivals | None) -> str:
    if said is None or not said.name:
        return f"rank {rank} said nothing"
    return f"rank {rank} was last in {said.name} over {_words(said.ranks)}"


def _not_arrived(known: Callable[[int], Arrivals | None], waits: Arrivals, rank: int) -> set[int]:
    """Ranks of the group in which `rank` waits that entered fewer of its collectives."""
    number, found = waits.entered.get(waits.ranks, 0), set()
    for other in waits.ranks:
        if other == rank:
            continue
        said = known(other)
        if said is None or said.entered.get(waits.ranks, 0) < number:
            found.add(other)
    return found


def _words(ranks: Ranks) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    text = f"ranks {', '.join(map(str, ranks[:_NAMED]))}"
    if len(ranks) > _NAMED:
        text += f" and {len(ranks) - _NAMED:,} more"
    return text
