"""Rows of several sequences that are made of all of the data, before the first step: `data.packing: rows`.

Owns: which sequences share a row. Does not own: that they do not see each other, and which rank takes a row
(`train.packing`).

A row is an example: what `batch_size`, steps and epochs count. TRL, axolotl and LLaMA-Factory mean that by packing.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from meshlora_ground.dataset import TokenizedDataset


def best_fit_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """The sequences of each row of at most `row_length` tokens, by best fit decreasing, as TRL's `bfd` has it.

    Longest first, ties in their order, each goes into the row with the least room that is enough, of several into the
    one that has had it longest; else into a new one (Ding et al., arXiv 2404.10830).
    """
    rows: list[list[int]] = []
    spaces: list[int] = []  # that some rows have, in order, each once
    rows_with: dict[int, deque[int]] = {}  # space -> numbers of rows
    for place in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        at = bisect.bisect_left(spaces, lengths[place])
        if at == len(spaces):
            row, space = len(rows), row_length
            rows.append([])
        else:
            space = spaces[at]
            row = rows_with[space].popleft()
            if not rows_with[space]:
                del spaces[at]
        rows[row].append(place)
        left = space - lengths[place]
        if left > 0:
            if not rows_with.setdefault(left, deque()):
                bisect.insort(spaces, left)
            rows_with[left].append(row)
    return rows


def in_rows(data: TokenizedDataset, row_length: int) -> TokenizedDataset:
    """The sequences of `data`, whose examples are rows of at most `row_length` tokens."""
    rows = best_fit_rows(np.diff(data.offsets).tolist(), row_length)
    order = np.array([place for row in rows for place in row], dtype=np.int64)
    found = dataclasses.replace(data, examples=None).chosen(order)
    sizes = [*map(len, rows)]
    return dataclasses.replace(found, examples=np.cumsum([0, *sizes], dtype=np.int64))


def words_of_rows(data: TokenizedDataset, row_length: int) -> str:
    """What has come of it, in one line."""
    full = len(data.input_ids) / (data.num_examples * row_length)
    return f"data.packing: rows: {len(data):,} sequences in {data.num_examples:,} rows, the examples, {full:.0%} full"
