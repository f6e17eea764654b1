"""The sequences of each optimizer step, and their division among data-parallel ranks.

Owns: the global order, a pure function of (number of sequences, seed, epoch), and its division among dp ranks.
Does not own: the sequences, processes, or the tensors of a micro-batch (`collate.py`).

The global order is independent of the topology: a run on any mesh takes the same sequences in the same step. Only
`share` knows dp, and the shares of a step partition it for any dp.
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
    """A permutation of `range(num_sequences)`: int64, `[num_sequences]`, read-only.

    Raises:
        UserError: a negative seed.
    """
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

    parts: (sequences of a source, its weight), of several sources with weights.

    Raises:
        UserError: a count below 1, a negative seed.
    """

    num_sequences: int
    global_batch_size: int
    seed: int
    parts: Parts = ()

    def __post_init__(self) -> None:
        for name in ("num_sequences", "global_batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}", "must be at least 1")
        if self.seed < 0:
            raise UserError(f"seed={self.seed}", "must not be negative")

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_sequences // self.global_batch_size)

    def batch(self, step: int) -> np.ndarray:
        """The indices of optimizer step `step`, counted from 0 across epochs: int64, `[<= global_batch_size]`."""
        assert step >= 0, step
        epoch, position = divmod(step, self.steps_per_epoch)
        order = (
            mixed_order(self.parts, seed=self.seed, epoch=epoch)
            if self.parts
            else epoch_order(self.num_sequences, seed=self.seed, epoch=epoch)
        )
        return order[position * self.global_batch_size : (position + 1) * self.global_batch_size]


def share(global_indices: np.ndarray, *, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[np.ndarray]:
    """The micro-batches of one dp rank, each `[<= micro_batch_size]` indices.

    Position p of the global batch goes to rank p % dp: with micro-batches of one sequence, micro-batch j of rank d is
    position j·dp + d. Every rank gets the same number of micro-batches, as their collectives must match; a rank that
    has run out gets an empty one, which must add neither loss nor tokens (`collate([])`).

    Raises:
        UserError: `micro_batch_size` below 1.
    """
    if micro_batch_size < 1:
        raise UserError(f"micro_batch_size={micro_batch_size}", "must be at least 1")
    assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
    # Rank 0 has the most: its number of micro-batches is everyone's.
    num_sequences_of_rank_0 = -(-len(global_indices) // dp_size)
    num_micro_batches = -(-num_sequences_of_rank_0 // micro_batch_size)
    mine = global_indices[dp_rank::dp_size]
    return [mine[j * micro_batch_size : (j + 1) * micro_batch_size] for j in range(num_micro_batches)]
