"""Restarted ranks meet in a part of the store where nothing of an earlier attempt is."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from meshlora.processes.launchers import part_of_attempt


def _attempt(store: Store, world: int = 3, *, last: float = 0.0) -> list[Store]:
    """The part of each rank; last: how much later rank 0 comes."""

    def rank(number: int) -> Store:
        time.sleep(last if number == 0 else 0.0)
        return part_of_attempt(store, number, world, timeout_s=5)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(rank, range(world)))


def test_ranks_of_an_attempt_share_words_and_see_none_of_the_one_before() -> None:
    store = HashStore()
    first = _attempt(store)
    first[1].set("abort", "rank 1 was killed")
    assert all(part.check(["abort"]) for part in first)
    second = _attempt(store, last=0.3)  # the others see the name of the first attempt for a while
    assert not any(part.check(["abort"]) for part in second)
    second[2].set("step", "8")
    assert [part.get("step") for part in second] == [b"8"] * 3


def test_a_rank_that_did_not_come_is_no_hang() -> None:
    store = HashStore()
    _attempt(store, world=2)
    with pytest.raises(RuntimeError, match="Timed out waiting"):
        part_of_attempt(PrefixStore("other", store), 1, 2, timeout_s=0.2)
    with pytest.raises(RuntimeError, match="Timed out waiting"):
        part_of_attempt(store, 1, 2, timeout_s=0.2)  # the name of the earlier attempt is not taken
