"""One attempt of a job that its launcher restarts: a part of the store without words of earlier attempts.

Owns: agreeing on the name of that part. Does not own: the store (`comm.groups`).

torchrun's agents keep one store over all restarts, and nothing in a rank's environment counts attempts the same on all
nodes: after a node was lost, the others' counts differ from a new one's. So rank 0 draws a name, and each rank accepts
only the name with which rank 0 has answered the rank's own draw.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store

# Between two looks, the first and the longest: thousands of ranks may wait for rank 0.
_LOOK_S, _MOST_S = 0.05, 2.0
_NAME = "attempt"


def part_of_attempt(store: Store, rank: int, world: int, *, timeout_s: float) -> Store:
    """The part of `store` for this attempt. Every rank of it calls this.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    own = secrets.token_hex(8)
    if rank == 0:
        store.set(_NAME, own)
        for other in range(1, world):
            store.wait([_drawn(own, other)], timedelta(seconds=timeout_s))
            store.set(_answered(own, other), _text(store.get(_drawn(own, other))))
        return PrefixStore(own, store)
    deadline, told, pause_s = time.monotonic() + timeout_s, "", _LOOK_S
    while time.monotonic() < deadline:
        if store.check([_NAME]) and (name := _text(store.get(_NAME))) != told:
            store.set(_drawn(name, rank), own)
            told = name
        if told and store.check([_answered(told, rank)]) and _text(store.get(_answered(told, rank))) == own:
            return PrefixStore(told, store)
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _MOST_S)
    raise RuntimeError(f"Timed out waiting {timeout_s:g} s for rank 0 to begin")


def _text(words: Any) -> str:
    return str(words.decode())


def _drawn(name: str, rank: int) -> str:
    return f"{name}/drawn/{rank}"


def _answered(name: str, rank: int) -> str:
    return f"{name}/answered/{rank}"
