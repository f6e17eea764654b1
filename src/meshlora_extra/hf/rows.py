"""The rows of a trainer on a mesh: each rank's share of a global batch, and what all ranks found, in order.

Owns: sharing the rows of a collator over dp, telling whether ranks were given the same ones, and gathering results in
the order of the rows. Does not own: the order of the data, which is the trainer's own sampler's, padding to what sp and
cp can cut (`run.feeding`).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import recursively_apply
from torch import Tensor

from meshlora.comm.collectives import all_gather
from meshlora.comm.groups import Axis
from meshlora_ground.errors import UserError

# Marks a batch whose rows stand in for none: a rank that has no row of a global batch runs one that does not count.
STANDS_IN = "meshlora_stands_in"
# The fingerprint of the rows of a global batch, which dp ranks must have alike.
ROWS = "meshlora_rows"
_IGNORED = -100


class SharedRows:
    """A collator of global batches: every rank of `dp` is given all rows of one, and collates its own share.

    So the sampler, the skipped batches of a resumed run, and the order are those of one process. A share is contiguous,
    and as large as the others or one larger.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dp: Axis) -> None:
        self.collate, self.dp = collate, dp

    def __call__(self, rows: list[Any]) -> Any:
        """Raises UserError: fewer rows than ranks, of a batch without labels, which could not be left out."""
        share = np.array_split(np.arange(len(rows)), self.dp.size)[self.dp.rank]
        seen = fingerprint_of(rows) if self.dp.size > 1 else 0  # before a collator that changes its rows
        batch = self.collate([rows[i] for i in share] or rows[:1])
        if self.dp.size > 1 and isinstance(batch, MutableMapping):
            batch[ROWS] = seen
        if len(rows) >= self.dp.size:
            return batch
        if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), Tensor):  # on all ranks alike
            rule = "a rank without a row runs one with all labels ignored, and this batch has no labels"
            way_out = "use dataloader_drop_last=True, or a number of rows that all ranks have a share of"
            raise UserError(f"a batch of {len(rows)} rows for dp={self.dp.size}", rule, way_out)
        if len(share):
            return batch
        return {**batch, "labels": torch.full_like(batch["labels"], _IGNORED), STANDS_IN: True}


def fingerprint_of(value: Any, start: int = 0) -> int:
    """32 bits of the numbers and texts anywhere in `value`; of other objects their types alone."""
    if isinstance(value, Mapping):
        value = list(itertools.chain.from_iterable(value.items()))
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(value, list | tuple) and not all(isinstance(one, int | float) for one in value):
        for one in value:
            start = fingerprint_of(one, start)
        return zlib.crc32(b"end", start)
    if isinstance(value, list | tuple):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return zlib.crc32(value.tobytes(), start)
    if value is None or isinstance(value, str | bytes | int | float):
        return zlib.crc32(repr(value).encode(), start)
    return zlib.crc32(type(value).__name__.encode(), start)


def gathered_rows(value: Any, dp: Axis) -> Any:
    """Tensors `[rows, ...]`, or `[]`, of all ranks of `dp` one after the other, anywhere in `value`. Collective."""
    if dp.size == 1:
        return value
    return recursively_apply(lambda tensor: _gathered(tensor, dp), value, error_on_other_type=True)


def _gathered(tensor: Tensor, dp: Axis) -> Tensor:
    own = sent = torch.atleast_1d(tensor)
    sizes = all_gather(torch.tensor([len(own)], device=own.device), dp).tolist()
    if own.dtype == torch.bool:  # which backends do not send
        sent = own.to(torch.uint8)
    room = sent.new_zeros(max(sizes), *own.shape[1:])  # as many rows as the rank with most has
    room[: len(own)] = sent
    every = all_gather(room, dp).view(dp.size, *room.shape)
    return torch.cat([rows[:size] for rows, size in zip(every, sizes, strict=True)]).to(own.dtype)


def padded_over(value: Any, dp: Axis, *, dim: int, pad_index: float, pad_first: bool) -> Any:
    """Tensors of `value` filled up along `dim` to the longest of all ranks of `dp`. Collective."""
    if dp.size == 1:
        return value

    def pad(tensor: Tensor) -> Tensor:
        if dim >= tensor.ndim:
            return tensor
        sizes = all_gather(torch.tensor([tensor.shape[dim]], device=tensor.device), dp)
        missing = int(sizes.max()) - tensor.shape[dim]
        places = [0, 0] * (tensor.ndim - dim)
        places[-2 if pad_first else -1] = missing
        return F.pad(tensor, places, value=pad_index)

    return recursively_apply(pad, value, error_on_other_type=True)
