"""The sequences of each optimizer step.

Owns: the global order, a pure function of (number of sequences, seed, epoch). Does not own: the sequences, and their
division among dp ranks (`train.batches.share`).

The order is independent of the topology: a run on any mesh takes the same sequences in the same step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from meshlora.reading.mixture import Parts, mixed_order
from meshlora.reading.shuffling import shuffled
from meshlora_ground.errors import UserError


# Every step of an epoch needs the same order; two are cached because a caller may look across the boundary.
@functools.lru_cache(maxsize=2)
def epoch_order(num_sequences: int, *, seed: int, epoch: int) -> np.ndarray:
    """A permutation of `range(num_sequences)`: int64, `[num_sequences]`, read-only. Raises: UserError: seed < 0."""
    if seed < 0:
        raise UserError(f"seed={seed}", "must not be negative")
    assert num_sequences >= 0, num_sequences
    assert epoch >= 0, epoch
    order = shuffled(num_sequences, seed=seed, key=(epoch,))
    order.flags.writeable = False
    return order


@dataclass(frozen=True)
class GlobalBatches:
    """The global batch of each optimizer step. Every sequence occurs once per epoch, or, of several sources with
    weights, as often as their shares say (`mixture.py`).

    The last batch of an epoch is smaller if `global_batch_size` does not divide `num_sequences`: nothing is dropped,
    repeated, or carried over to the next epoch.

    parts: (sequences of a source, its weight), of several sources with weights. shuffles: False: each epoch has the
    order of the dataset.

    Raises:
        UserError: a count below 1, a negative seed.
    """

    num_sequences: int
    global_batch_size: int
    seed: int
    parts: Parts = ()
    shuffles: bool = True

    def __post_init__(self) -> None:
        for name in ("num_sequences", "global_batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}", "must be at least 1")
        if self.seed < 0:
            raise UserError(f"seed={self.seed}", "must not be negative")

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_sequences // self.global_batch_size)  # rounded up: the last batch may be smaller

    def batch(self, step: int) -> np.ndarray:
        """The indices of optimizer step `step`, counted from 0 across epochs: int64, `[<= global_batch_size]`."""
        assert step >= 0, step
        epoch, position = divmod(step, self.steps_per_epoch)
        if not self.shuffles:
            assert not self.parts, "sources with weights are drawn"
            first = position * self.global_batch_size
            return np.arange(first, min(first + self.global_batch_size, self.num_sequences))
        if self.parts:
            order = mixed_order(self.parts, seed=self.seed, epoch=epoch)
        else:
            order = epoch_order(self.num_sequences, seed=self.seed, epoch=epoch)
        return order[position * self.global_batch_size : (position + 1) * self.global_batch_size]
