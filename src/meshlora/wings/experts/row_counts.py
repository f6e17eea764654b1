"""How many rows each expert has: known to the device, and to the host where that asks.

Owns: where each expert's rows end, and the one read of it. Does not own: the sort of the rows
(`wings.experts.products`), who sends them (`wings.experts.dispatch`).

A product grouped by expert reads the ends of the groups on the device. A loop over experts needs their sizes on the
host, which waits for the device to learn them: it is asked for the first time that somebody needs them, and then kept.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshlora_ground.transfer import to_device


class RowCounts:
    """Rows of each of `number` experts, or of each pair of an expert and an adapter, sorted by it.

    Attributes:
        number: of experts, or pairs. num_rows: of all together. ends: int32 `[number]`, where the rows of each end.
    """

    def __init__(self, ends: Tensor, num_rows: int) -> None:
        self.number, self.num_rows = len(ends), num_rows
        self.ends = ends
        self._per_expert: RowCounts | None = None

    @classmethod
    def known(cls, counts: Sequence[int], device: torch.device | str) -> RowCounts:
        """Those that the host has already."""
        # Summed on the host, and then to the device without waiting for it.
        ends = torch.tensor(counts, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        made = cls(to_device(ends, device), sum(counts))
        made.on_host = list(counts)
        return made

    @classmethod
    def of_sorted(cls, experts: Tensor, number: int) -> RowCounts:
        """Those of the ids of experts `[N]`, sorted."""
        ends = torch.searchsorted(experts, numbers(number, experts.device), right=True, out_int32=True)
        return cls(ends, len(experts))

    @functools.cached_property
    def on_host(self) -> list[int]:
        """Rows of each. The host waits for the device."""
        return self.sizes.tolist()

    @functools.cached_property
    def sizes(self) -> Tensor:
        """int64 `[number]`: rows of each."""
        return sizes_of(self.ends, self.num_rows)

    @functools.cached_property
    def is_empty(self) -> Tensor:
        """bool `[number]`: whether it has no rows."""
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1)) == 0

    def of_experts(self, num_experts: int) -> RowCounts:
        """Rows per expert, from rows per expert or per pair of expert and adapter."""
        if num_experts == self.number:
            return self
        if self._per_expert is None:
            each = self.number // num_experts
            found = RowCounts(self.ends[each - 1 :: each].contiguous(), self.num_rows)
            if "on_host" in vars(self):
                found.on_host = [sum(self.on_host[e * each : (e + 1) * each]) for e in range(num_experts)]
            self._per_expert = found
        assert self._per_expert.number == num_experts, (self._per_expert.number, num_experts)
        return self._per_expert


def sizes_of(ends: Tensor, num_rows: int) -> Tensor:
    """int64: sizes of the groups of `num_rows` rows that end at `ends`."""
    assert len(ends) or not num_rows, num_rows
    sizes = ends.to(torch.int64)
    sizes[1:] -= ends[:-1]
    return sizes


class _Recorded:
    """Of the record that is being made, in whatever thread: its `numbers`. None: none is made."""

    made: dict[tuple[int, int], Tensor] | None = None


@contextlib.contextmanager
def of_a_record() -> Iterator[None]:
    """Inside the block `numbers` are made anew, once for all layers, and not kept after it.

    A record reads the memory of its tensors whenever it is replayed. Of those that are kept here some are dropped, and
    others of a record would be read before its replay has written them.
    """
    _Recorded.made = {}
    try:
        yield
    finally:
        _Recorded.made = None


def numbers(stop: int, device: torch.device, step: int = 1) -> Tensor:
    """int64: 0, step, ... below `stop`, to be read only: made once, not in each layer."""
    made = _Recorded.made
    if made is None:
        return _kept(stop, device, step)
    if (stop, step) not in made:
        made[stop, step] = torch.arange(0, stop, step, device=device)
    return made[stop, step]


@functools.lru_cache(maxsize=32)
def _kept(stop: int, device: torch.device, step: int) -> Tensor:
    return torch.arange(0, stop, step, device=device)
