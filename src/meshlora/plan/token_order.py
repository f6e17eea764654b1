"""Context parallelism: which tokens of each row are whose.

Owns: dealing the tokens of a row to the cp ranks. Does not own: cutting activations, or attention
(`wings.context.context`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from meshlora_ground.errors import UserError

# Tokens of a row on each rank, at least: the code of recurrent mixers takes a single one for one that is generated.
FEWEST = 2


def token_order(rows: Sequence[Sequence[int]], *, size: int, is_balanced: bool = True) -> np.ndarray:
    """int64 `[B, S]`: of each row the positions of rank 0's tokens, then rank 1's, ...: S / size each, ascending.

    Every rank gets tokens of every document: a chunk at its head and one at its tail, counted from both ends in the
    order of the ranks. A token attends to those before it, so that the first chunk has the least work and the last one
    the most, and each pair the same. What does not divide evenly goes round the ranks, from one document to the next.

    rows: the numbers of tokens of the documents of each row, padding at its end included; S is their sum, the same for
    all rows, and divisible by size. is_balanced: else each rank gets a contiguous part.
    """
    found = []
    for documents in rows:
        length = sum(documents)
        assert length % size == 0, (documents, size)
        owner = np.repeat(np.arange(size), length // size)
        if is_balanced:
            owner = np.concatenate(_owners(documents, size))
        # Stable: the tokens of a rank stay in order.
        found.append(np.argsort(owner, kind="stable"))
    return np.stack(found)


def order_of_rows(
    shape: Sequence[int], position_ids: Tensor | None, *, size: int, is_balanced: bool = True
) -> np.ndarray:
    """`token_order` of rows `[B, S]`, whose documents begin at position 0. The host waits for `position_ids`.

    Raises:
        UserError: size does not divide S, or leaves fewer than `FEWEST` tokens.
    """
    rows, length = shape
    if length % size or length < FEWEST * size:
        way_out = "pad them, as meshlora.collator(model, tokenizer) does"
        rule = f"cp={size} must divide their number, and each rank takes {FEWEST} or more"
        raise UserError(f"rows of {length} tokens", rule, way_out)
    documents = [[length]] * rows
    if position_ids is not None:
        documents = []
        for row in position_ids.expand(rows, length).cpu():
            starts = (row == 0).nonzero().flatten().tolist()
            documents.append(np.diff([*starts, length]).tolist())
    return token_order(documents, size=size, is_balanced=is_balanced)


def _owners(documents: Sequence[int], size: int) -> list[np.ndarray]:
    """The rank of each token, by document."""
    found, turn = [], 0  # the rank that takes the next token that is left over
    for length in documents:
        each = np.full(size, length // size)
        more = length % size
        # What is left over goes on where the last document ended, so that ranks differ by no token in the end.
        each[(turn + np.arange(more)) % size] += 1
        turn = (turn + more) % size
        heads = each // 2  # of the chunk at the head; the tail, in the opposite order of ranks, has the rest
        ranks = np.arange(size)
        found.append(np.concatenate([np.repeat(ranks, heads), np.repeat(ranks[::-1], (each - heads)[::-1])]))
    return found
