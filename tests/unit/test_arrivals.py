"""From what each rank said of itself to the ranks that are missing."""

from __future__ import annotations

import pytest

from meshlora.comm.groups import open_mesh, simulated_job
from meshlora.processes.arrivals import Arrivals, Ranks
from meshlora.processes.who_is_missing import say_who_is_missing
from meshlora_ground.topology import Topology

ROW, COLUMN, ALL = (0, 1), (1, 3), (0, 1, 2, 3)


def _rank(name: str, ranks: Ranks, *, is_in: bool, **entered: int) -> Arrivals:
    counts = {{"row": ROW, "column": COLUMN, "all": ALL}[group]: count for group, count in entered.items()}
    return Arrivals(counts, name, ranks, is_in)


def test_the_rank_that_is_not_in_the_collective_is_named() -> None:
    known = {0: _rank("all_reduce", ROW, is_in=True, row=7), 1: _rank("all_gather", ROW, is_in=False, row=6)}
    assert say_who_is_missing(known.get, 0, timeout_s=5) == (
        "all_reduce over ranks 0, 1 (number 7 of this group) was given up after 5 s (train.timeout_s): rank 1 did not "
        "arrive; rank 1 was last in all_gather over ranks 0, 1"
    )


def test_a_rank_that_waits_for_a_third_one_is_not_the_cause() -> None:
    known = {
        0: _rank("all_reduce", ROW, is_in=True, row=7),
        1: _rank("broadcast", COLUMN, is_in=True, row=6, column=3),
        3: _rank("broadcast", COLUMN, is_in=False, column=2),
    }
    assert "(train.timeout_s): rank 3 did not arrive" in say_who_is_missing(known.get, 0, timeout_s=5)


def test_a_rank_that_never_spoke_is_missing() -> None:
    known = {rank: _rank("all_reduce", ALL, is_in=True, all=2) for rank in (0, 1, 3)}
    assert "rank 2 did not arrive; rank 2 said nothing" in say_who_is_missing(known.get, 3, timeout_s=5)


def test_ranks_that_wait_for_each_other_are_both_named() -> None:
    """Their collectives came in another order on each: neither hangs."""
    known = {
        1: _rank("broadcast", COLUMN, is_in=True, column=3, all=1),
        3: _rank("all_reduce", ALL, is_in=True, column=2, all=2),
        0: _rank("all_reduce", ALL, is_in=True, all=2),
        2: _rank("all_reduce", ALL, is_in=True, all=2),
    }
    assert "rank 3 did not arrive" in say_who_is_missing(known.get, 1, timeout_s=5)


def test_all_came_and_yet_it_did_not_end() -> None:
    known = {rank: _rank("all_reduce", ROW, is_in=True, row=2) for rank in ROW}
    assert "though all ranks came" in say_who_is_missing(known.get, 0, timeout_s=5)


@pytest.mark.parametrize("is_in", [True, False])
def test_words_are_read_back(is_in: bool) -> None:
    partitions = [[(0, 1), (2, 3)], [(0, 2), COLUMN], [ALL]]
    rank = _rank("all_reduce", COLUMN, is_in=is_in, column=2, all=5)
    rank.partitions = partitions
    assert Arrivals.read(rank.words(3), 3, partitions) == rank


def test_words_do_not_grow_with_the_job() -> None:
    ranks = tuple(range(16_384))
    rank = Arrivals({ranks: 10**6}, "all_reduce", ranks, True, [[ranks]])
    assert len(rank.words(5)) < 100


def test_ranks_that_wait_in_channels_between_stages_are_followed_to_the_one_that_hangs() -> None:
    """Four stages, each with its channels to the next; the last one hangs."""
    with simulated_job(4):
        arrivals = open_mesh(Topology.parse("pp=4")).world.arrivals
    pairs = {place: (place, place + 1) for place in range(3)}
    assert all([pair] in arrivals.partitions for pair in pairs.values())
    assert [(0, 1, 2, 3)] in arrivals.partitions, "of the axis itself"
    said = {
        rank: Arrivals({pairs[rank]: 3}, "receive", pairs[rank], True, arrivals.partitions).words(rank)
        for rank in range(3)
    }
    known = {rank: Arrivals.read(words, rank, arrivals.partitions) for rank, words in said.items()}
    assert "(train.timeout_s): rank 3 did not arrive" in say_who_is_missing(known.get, 0, timeout_s=5)
