"""Which ranks are missing when a collective has waited too long.

Owns: asking all ranks where they are, and finding from their answers those that did not arrive. Does not own: what a
rank answers (`processes.arrivals`), how ranks ask each other (`processes.heartbeat`), the time limit of groups
(`comm.groups`).
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
