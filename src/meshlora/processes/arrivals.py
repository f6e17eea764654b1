"""Arrivals at collectives: how many of each group this rank has entered, and which it is in now.

Owns: the count, and its words for a rank that asks. Does not own: the collectives (`comm.collectives`), who is missing
where one has waited too long (`processes.who_is_missing`).

Words have a fixed size: a group is named by the number of its partition of the ranks, not by its members.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from meshlora_ground.errors import CollectiveTimeoutError

# gloo's words for a timeout, and ours. NCCL ends the process by itself and names the collective.
_TIMED_OUT = re.compile("[Tt]imed out")

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
        if self.explain is not None and isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
            raise CollectiveTimeoutError(self.explain()) from error  # still in it: that is its answer to who asks
        self.is_in = False

    def words(self, rank: int) -> str:
        """As JSON, for the other ranks; `rank` is this one."""
        own = _own_groups(rank, self.partitions)
        counts = [self.entered.get(ranks, 0) for ranks in own]
        now = own.index(self.ranks) if self.ranks in own else None
        return json.dumps({"entered": counts, "name": self.name, "now": now, "is_in": self.is_in})

    @classmethod
    def read(cls, words: str, rank: int, partitions: list[Partition]) -> Arrivals:
        """Parse the `words` of `rank`."""
        said = json.loads(words)
        own = _own_groups(rank, partitions)
        entered = {ranks: count for ranks, count in zip(own, said["entered"], strict=True) if ranks and count}
        now: Ranks = ()
        if said["now"] is not None:
            now = own[said["now"]]
        return cls(entered, said["name"], now, said["is_in"], partitions)


def _own_groups(rank: int, partitions: Sequence[Partition]) -> list[Ranks]:
    """The group of `rank` in each partition; `()` where it is in none, as in channels between other stages."""
    return [next((ranks for ranks in partition if rank in ranks), ()) for partition in partitions]
