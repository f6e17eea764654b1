"""What a chat template leaves out of trained answers, and what is said of it.

Owns: the kinds, their form in a dataset's arrays, and the words. Does not own: finding out (`turns.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from meshlora.data.records import Record

NO_END, EMPTY, LEFT_OUT, CUT = "end", "empty", "left out", "cut"
KINDS = ("content", "reasoning", NO_END, EMPTY, LEFT_OUT, CUT)
# Of a mark's kind. A call that is left out is refused.
AS_KIND = {"content": "content", "reasoning": "reasoning"}

_WORDS = {
    "content": "words of trained answers are not in the text that the chat template renders, and so not trained",
    "reasoning": "reasoning of trained answers is not in the text that the chat template renders, and so not trained",
    NO_END: "the rendered text does not end trained answers with a token that the model stops at",
    EMPTY: "trained answers are empty: the model learns to say nothing (data.empty_answers: skip leaves them out)",
    CUT: "a trained turn is cut by max_length, and trained there without its end",
    LEFT_OUT: "empty answers are not in the text that the chat template renders, and so not trained",
}


def as_array(rows: Iterable[tuple[int, Sequence[str]]]) -> np.ndarray:
    """int64 `[N]`: (index of a record, what is lost of it), each pair as one number."""
    codes = [index * len(KINDS) + KINDS.index(kind) for index, lost in rows for kind in dict.fromkeys(lost)]
    return np.array(codes, dtype=np.int64)


def words_of(lost: np.ndarray, record_at: Callable[[int], Record], number: int) -> list[str]:
    """A line for each kind that is lost, with how many of `number` records lose it, and the first of them."""
    lines = []
    for code, kind in enumerate(KINDS):
        own = lost[lost % len(KINDS) == code] // len(KINDS)
        if len(own):
            first = record_at(int(own.min())).origin
            lines.append(f"{len(own):,} of {number:,} records, {first} first: {_WORDS[kind]}")
    return lines
