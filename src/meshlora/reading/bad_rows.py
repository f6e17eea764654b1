"""Rows that cannot be trained, and are passed over where `data.on_bad_row: skip` says so.

Owns: how many may be, and what is said of them. Does not own: what is wrong with a row (`records.py`, `chat.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshlora_ground.errors import UserError

ERROR, SKIP = "error", "skip"
# The most that may be passed over: one row in so many. More are no accidents.
_ONE_IN = 10


def words_of_bad(number: int, total: int, first: Sequence[str], *, are_all: bool = False) -> str:
    """What is said of `number` of `total` rows that are passed over. first: where some stand, and what is wrong;
    are_all: it says so of all.

        words_of_bad(1, 20, ["a.jsonl:3: no messages"])

    Raises:
        UserError: they are too many.
    """
    lines = ["", *first]
    if number > len(first) and not are_all:
        lines.append(f"and {number - len(first)} more")
    named = "\n  ".join(lines)
    given = f"{number:,} of {total:,} rows cannot be trained"
    if number * _ONE_IN > total:
        rule = f"data.on_bad_row: skip passes over at most one in {_ONE_IN}"
        raise UserError(given, rule, f"correct them, or take them out:{named}")
    return f"{given}, and are passed over (data.on_bad_row: skip):{named}"
