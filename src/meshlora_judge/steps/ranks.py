"""The ranks of a recording as data ranks, and their parts of a tensor as whole ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshlora_judge.recording.files import Recording


@dataclass(frozen=True)
class MicroBatchOf:
    """A recorded micro-batch: `given` to the forward number `number` of a data rank's step."""

    rank: int
    number: int
    given: Mapping[str, Any]


@dataclass(frozen=True)
class DataRanks:
    """Ranks that read the same rows by design are one data rank.

    Attributes:
        of: rank -> its data rank. number: of data ranks. repeats: ranks that had the rows of another by no design.
    """

    of: tuple[int, ...]
    number: int
    repeats: tuple[int, ...]

    def micro_batches(self, recordings: Sequence[Recording], step: int) -> list[MicroBatchOf]:
        """Those of one step, once for each data rank."""
        found = list[MicroBatchOf]()
        for data_rank in range(self.number):
            first = self.of.index(data_rank)
            given = recordings[first].steps[step].micro_batches
            found += [MicroBatchOf(data_rank, number, micro) for number, micro in enumerate(given)]
        return found


def data_ranks(recordings: Sequence[Recording]) -> DataRanks:
    """Ranks with equal rows are one data rank where the model is split over them; elsewhere that is a mistake."""
    is_split = any(map(_is_split, recordings))
    of, repeats = list[int](), list[int]()
    for rank, recording in enumerate(recordings):
        same = next((other for other in range(rank) if _same_rows(recordings[other], recording)), None)
        if same is None:
            of.append(max(of, default=-1) + 1)
        elif is_split:
            of.append(of[same])
        else:
            of.append(max(of) + 1)
            repeats.append(rank)
    return DataRanks(tuple(of), max(of) + 1, tuple(repeats))


def _is_split(recording: Recording) -> bool:
    """Whether the model is split over ranks in more than storage: tensor parallel, by its DTensors or its parts."""
    for lies in recording.frozen.values():
        if lies["kind"] != "dtensor":
            continue
        names = {name for name, size in lies["mesh"] if size > 1}
        if any("tp" in name or "tensor" in name for name in names):
            return True
        if not recording.fsdp:
            return True
    return False


def _same_rows(a: Recording, b: Recording) -> bool:
    for one, other in zip(a.steps, b.steps, strict=True):
        if len(one.micro_batches) != len(other.micro_batches):
            return False
        for x, y in zip(one.micro_batches, other.micro_batches, strict=True):
            if not _equal(x.get("input_ids"), y.get("input_ids")):
                return False
    return True


def _equal(x: Any, y: Any) -> bool:
    return isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and torch.equal(x, y)


def wholes(parts: Sequence[Tensor | None], shape: Sequence[int]) -> list[Tensor | None] | None:
    """Each rank's whole tensor of `shape`, out of its own part and those of its neighbours; None: no parts of one.

    Parts are equal slices of one dimension, of consecutive ranks, as tensor parallelism leaves them.
    """
    there = [part for part in parts if part is not None]
    if all(list(part.shape) == list(shape) for part in there):
        return list(parts)
    if len(there) != len(parts):
        return None
    for dim, size in enumerate(shape):
        own = there[0].shape[dim] if there[0].ndim == len(shape) else 0
        if not own or own == size or size % own or len(parts) % (size // own):
            continue
        count, found = size // own, list[Tensor | None]()
        for first in range(0, len(there), count):
            group = there[first : first + count]
            if any(part.shape != there[0].shape for part in group):
                return None
            whole = torch.cat(list(group), dim)
            if list(whole.shape) != list(shape):
                return None
            found += [whole] * count
        return found
    return None
