"""A dataset in numbers, and a sequence in parts that are trained and parts that are not: what `meshlora data` shows.

Owns: counts, the distribution of lengths, the parts. Does not own: how they are shown (`meshlora_extra.commands.data`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from meshlora_ground.dataset import Taken, TokenizedDataset

_MOST_BINS = 12


@dataclass(frozen=True)
class Summary:
    """The numbers of a dataset.

    Attributes:
        records: of its files, each answer of a pair by itself. too_long: of these, more than max_length tokens.
        dropped: of these, left out. trained_tokens: those that are predicted. median: of the lengths in tokens.
        bins: (shortest length, longest length, number of sequences) of equal ranges of lengths.
    """

    records: int
    too_long: int
    dropped: int
    sequences: int
    examples: int
    tokens: int
    trained_tokens: int
    shortest: int
    median: float
    longest: int
    bins: list[tuple[int, int, int]]


def summary(data: TokenizedDataset) -> Summary:
    lengths, taken = np.diff(data.offsets), data.taken
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = -(-(longest - shortest + 1) // _MOST_BINS)  # rounded up
    numbers = np.bincount((lengths - shortest) // width).tolist()
    if taken is None:  # several sources, of which each has said it
        taken = Taken(len(data), longest)
    return Summary(
        records=taken.num_records,
        too_long=taken.num_too_long,
        dropped=taken.num_dropped,
        sequences=len(data),
        examples=data.num_examples,
        tokens=len(data.input_ids),
        trained_tokens=data.num_trained_tokens,
        shortest=shortest,
        median=float(np.median(lengths)),
        longest=longest,
        bins=[(shortest + n * width, shortest + (n + 1) * width - 1, number) for n, number in enumerate(numbers)],
    )


def parts(data: TokenizedDataset, index: int) -> list[tuple[bool, list[int]]]:
    """Sequence `index` as runs of tokens: (whether they are trained, their ids). The first token has no predecessor."""
    sequence = data[index]
    is_trained = sequence.is_trained.copy()  # a view of the dataset's, which is read-only
    is_trained[:1] &= not data.predicts_next
    ids = sequence.input_ids.tolist()
    found: list[tuple[bool, list[int]]] = []
    for key, run in itertools.groupby(is_trained.tolist()):
        length = len([*run])
        found.append((key, ids[:length]))
        del ids[:length]
    return found
