"""Messages between stages in the order of the schedule: no two ranks wait for each other, whatever a send waits for."""

from __future__ import annotations

from collections import Counter

from meshlora.wings.stages.pipeline_schedule import one_forward_one_backward
from tests.for_each import for_each

# (kind, what is sent, the first of the two ranks between which it goes): each pair is a group of `Channels`.
Message = tuple[str, str, int]
SIZES = [
    *((number, size, 1) for size in (2, 3, 4) for number in (1, 2, 3, 7)),
    *((rounds * size, size, interleave) for size in (2, 3, 4) for interleave in (2, 3) for rounds in (1, 2)),
]


def _messages(rank: int, number: int, size: int, interleave: int) -> list[Message]:
    """What `rank` sends and receives in a step, in its order."""
    found: list[Message] = []
    before, last = (rank - 1) % size, size * interleave - 1
    for _, stage, is_forward in one_forward_one_backward(number, rank=rank, size=size, interleave=interleave):
        if is_forward:
            found += [("receive", "stream", before)] * (stage > 0) + [("send", "stream", rank)] * (stage < last)
        else:
            found += [("receive", "gradient", rank)] * (stage < last) + [("send", "gradient", before)] * (stage > 0)
    return found


def _ends(number: int, size: int, interleave: int, *, waits: str) -> bool:
    """Whether all ranks come to the end of a step.

    waits: what a send waits for: `taken`, until the other rank takes it; `turn`, until the one before it on its group
    is taken, as on a stream; `first`, the first on each group until the other rank takes it, as NCCL connects them.
    """
    left = [_messages(rank, number, size, interleave)[::-1] for rank in range(size)]
    sent, taken = Counter[tuple[str, int]](), Counter[tuple[str, int]]()

    def goes(rank: int) -> bool:
        kind, what, pair = left[rank][-1]
        group = (what, pair)
        is_first = not taken[group]
        if kind == "receive":
            return sent[group] > taken[group]
        is_awaited = any(ops and ops[-1] == ("receive", what, pair) for ops in left)
        if waits == "taken" or (waits == "first" and is_first):
            return is_awaited
        return waits != "turn" or sent[group] == taken[group]

    while any(left):
        able = next((rank for rank in range(size) if left[rank] and goes(rank)), None)
        if able is None:
            return False
        kind, *group = left[able].pop()
        (sent if kind == "send" else taken)[group[0], group[1]] += 1
    return True


@for_each("waits", ["turn", "first"])
@for_each(("number", "size", "interleave"), SIZES)
def test_no_two_stages_wait_for_each_other(number: int, size: int, interleave: int, waits: str) -> None:
    assert _ends(number, size, interleave, waits=waits)


def test_stages_would_wait_for_each_other_if_a_rank_waited_for_what_it_sends() -> None:
    """Why a send is never waited for, and why both directions are not on one stream."""
    assert not all(_ends(*sizes, waits="taken") for sizes in SIZES)
