"""What becomes of a record with more tokens than `max_length`: `data.too_long`.

Owns: the choices, the windows of a record that is split, what is said of them, and the errors. Does not own:
tokenisation (`tokenization.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from meshlora.reading.records import MAX_SHOWN
from meshlora_ground.dataset import Taken
from meshlora_ground.errors import UserError, did_you_mean

TooLong = Literal["truncate", "drop", "split", "error"]


def check_too_long(too_long: str) -> None:
    """Raises: UserError: it is none of the choices."""
    if too_long not in get_args(TooLong):
        near = did_you_mean(too_long, get_args(TooLong))
        raise UserError(f"data.too_long={too_long!r}", "it is no such choice", near)


def windows(
    ids: np.ndarray, is_trained: np.ndarray, max_length: int, *, at_turns: bool, ends: Sequence[int] = ()
) -> tuple[list[tuple[np.ndarray, np.ndarray]], bool]:
    """(the windows of a record with a trained token in them, each `(ids, is_trained)` of at most `max_length` tokens;
    whether a trained turn is cut).

    at_turns: a window ends after the last trained turn that ends in it, if one does; the next begins behind that, if
    what is there is not trained. Else neighbours share one token, the last of one and the first of the next, where it
    is seen and not trained. So every trained token but the first of the record is predicted exactly once. ends: where
    turns end of which all around is trained, as numbers of tokens.
    """
    own_ends = np.array(sorted(ends), dtype=np.int64)  # with a type: there may be none
    if at_turns:
        own_ends = np.union1d(own_ends, np.flatnonzero(is_trained[:-1] & ~is_trained[1:]) + 1)
    found, start, is_cut = [], 0, False
    while start < max(len(ids) - 1, 1):  # a window of the last token alone would predict nothing
        stop, after = min(start + max_length, len(ids)), 1
        if stop < len(ids) and len(own := own_ends[(own_ends > start + 1) & (own_ends <= stop)]):
            stop = int(own[-1])
            after = int(is_trained[stop]) if stop < len(ids) else 0
        elif stop < len(ids):
            is_cut |= is_cut_turn(is_trained, stop)
        part, trained = ids[start:stop], is_trained[start:stop].copy()
        trained[:1] &= start == 0  # else it may be the last of the window before, and is predicted there
        if trained[1:].any():
            found.append((part, trained))
        start = len(ids) if stop == len(ids) else stop - after  # one token is shared, but for a gap between turns
    return found, is_cut


def is_cut_turn(is_trained: np.ndarray, place: int) -> bool:
    """Whether a cut before `place` is inside a trained turn."""
    return bool(is_trained[place - 1] and is_trained[place])


@dataclass
class Found:
    """Records that cannot be used as they are, as words, collected so that several are named at once.

    cut_off: too long, and trained after `max_length` alone. untrained: not too long, and trained nowhere. nothing: left
    out, as the chat template writes nothing of their answers.
    """

    too_long: list[str] = field(default_factory=list)
    cut_images: list[str] = field(default_factory=list)
    split_images: list[str] = field(default_factory=list)
    cut_off: list[str] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)
    nothing: list[str] = field(default_factory=list)

    def refuse(self, taken: Taken, num_sequences: int) -> None:
        """Raises: UserError: there are some; or nothing is left of all records."""
        number, length = taken.num_records, f"max_length={taken.max_length}"
        drop = "raise data.max_length, or leave them out: data.too_long: drop"
        if taken.too_long == "error":
            _refuse(self.too_long, number, f"are longer than {length}", "raise data.max_length, or data.too_long: drop")
        _refuse(self.cut_images, number, f"have images that do not end within {length}", drop)
        _refuse(self.split_images, number, "have images, and cannot be split", drop)
        _refuse(self.cut_off, number, f"have no trained token within {length}", drop)
        _refuse(self.untrained, number, "have no trained token", "take them out of the data")
        if not num_sequences and self.nothing:
            rule = "the chat template writes nothing of their trained answers"
            raise UserError(f"all {number:,} records, {self.nothing[0]} first", rule, "give data.chat_template: FILE")
        if not num_sequences:
            raise UserError(f"all {number:,} records", f"they are longer than {length}", "raise data.max_length")


def _refuse(found: Sequence[str], number: int, rule: str, way_out: str) -> None:
    if found:
        more = ", …" if len(found) > MAX_SHOWN else ""
        raise UserError(f"{len(found)} of {number} records: {', '.join(found[:MAX_SHOWN])}{more}", rule, way_out)
