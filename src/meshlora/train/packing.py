"""Packing: several sequences in one row, separated by position ids that restart with each.

Owns: which sequences of a step share a row and which dp rank takes them, the joined sequence, its position ids. Does
not own: the tensors (`train.collation`), attention that respects the boundaries (transformers' masks derive them from
position ids), or the check that every layer does (`run.packing_check`).

The placement depends on dp, the result does not: the sequences of a step, their trained tokens and their loss are those
of the same step without packing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as AbstractSequence

import numpy as np
import torch

from meshlora.train.batch import Batch
from meshlora_ground.dataset import Sequence
from meshlora_ground.masks import token_numbers

Rows = list[list[int]]  # for each row the positions of its sequences in the global batch


def packed_rows(lengths: AbstractSequence[int], dp_size: int, row_length: int) -> list[Rows]:
    """The rows of each dp rank, of at most `row_length` tokens; a longer sequence gets its own row.

    Longest first, each sequence goes to the rank with the fewest tokens so far, and there into the first row with
    room. So ranks differ by at most one sequence's tokens.

    lengths: tokens of each sequence of the global batch, in its order.
    """
    shares: list[list[int]] = [[] for _ in range(dp_size)]
    tokens = [0] * dp_size
    # Both orders are of the numbers alone, ties by place and by rank: every rank comes to the same.
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        lightest = min(range(dp_size), key=lambda rank: (tokens[rank], rank))
        shares[lightest].append(place)
        tokens[lightest] += lengths[place]
    return [_first_fit(share, lengths, row_length) for share in shares]


def _first_fit(places: list[int], lengths: AbstractSequence[int], row_length: int) -> Rows:
    """Rows of `places`, given longest first; sorted so that rows of similar length are adjacent."""
    rows: Rows = []
    filled: list[int] = []
    for place in places:
        fitting = (row for row, tokens in enumerate(filled) if tokens + lengths[place] <= row_length)
        row = next(fitting, len(rows))
        if row == len(rows):
            rows.append([])
            filled.append(0)
        rows[row].append(place)
        filled[row] += lengths[place]
    return [rows[row] for row in sorted(range(len(rows)), key=lambda row: (-filled[row], row))]


def joined(sequences: AbstractSequence[Sequence]) -> Sequence:
    """Concatenate sequences. The first token of each is not a target, so that no label crosses a boundary."""
    input_ids = np.concatenate([sequence.input_ids for sequence in sequences])
    is_trained = np.concatenate([sequence.is_trained for sequence in sequences])
    start = 0
    for sequence in sequences:
        is_trained[start] = False
        start += len(sequence.input_ids)
    columns = {}
    for name in sequences[0].columns:
        columns[name] = np.concatenate([sequence.columns[name] for sequence in sequences])
    return Sequence(input_ids, is_trained, columns)


def with_positions(
    batch: Batch, lengths: AbstractSequence[AbstractSequence[int]], places: AbstractSequence[AbstractSequence[int]]
) -> Batch:
    """`batch` with position ids that restart at 0 with each sequence and with the padding after the last.

    The token numbers are the same as without packing.

    lengths, places: for each row, the token counts of its sequences and their positions in the global batch; empty for
        a dummy batch.
    """
    position_ids, tokens = torch.zeros_like(batch.input_ids), torch.zeros_like(batch.tokens)
    of_rows = [padded_lengths(of_row, position_ids.shape[1]) for of_row in lengths or [[]]]
    for row, of_row in enumerate(of_rows):
        start = 0
        # 0: of the padding, if there is any.
        for place, length in zip((*(places or [[]])[row], 0), of_row, strict=False):
            own = slice(start, start + length)
            position_ids[row, own] = torch.arange(length)
            tokens[row, own] = token_numbers(torch.tensor([place]), length)[0]
            start += length
    has_one_each = max(map(len, lengths), default=0) < 2
    return dataclasses.replace(
        batch, position_ids=position_ids, tokens=tokens, lengths=of_rows, has_one_each=has_one_each
    )


def padded_lengths(lengths: AbstractSequence[int], row_length: int) -> list[int]:
    """`lengths` of the sequences of a row, with its padding, if there is any, as one more."""
    rest = row_length - sum(lengths)
    if rest:
        return [*lengths, rest]
    return [*lengths]
