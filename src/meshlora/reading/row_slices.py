"""Which rows of a source are read: `data.max_samples`, and `rows` of a source.

Owns: slices and their bounds. Does not own: reading (`sources.py`), what rows are held out (`held_rows.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from meshlora_ground.errors import UserError

Row = tuple[str, dict[str, Any]]  # origin, for error messages; values
_BOUND = r"(-?\d{1,15}|\d{1,3}(?:\.\d{1,9})?%)?"
_SLICE = re.compile(f"{_BOUND}:{_BOUND}")


@dataclass(frozen=True)
class Slice:
    """The rows from `start` on, before `stop`, as in Python: "100:200", ":5%", "95%:", "-50:". "": all.

    most: at most so many of them.
    """

    text: str = ""
    most: int | None = None

    def __post_init__(self) -> None:
        found = _SLICE.fullmatch(self.text or ":")
        if found is None or any(Fraction(each[:-1]) > 100 for each in found.groups("") if each.endswith("%")):
            rule = "it is START:STOP, each a number of rows, per cent of them, or nothing"
            raise UserError(f"rows: {self.text[:60]!r}", rule, 'as in "100:200", ":5%" or "95%:"')

    def bounds(self, count: Callable[[], int]) -> tuple[int, int | None]:
        """(the first row, that after the last; None: to the end). count: the number of all rows, if it is needed."""
        start_text, _, stop_text = self.text.partition(":")
        start, stop = 0, None
        if "%" in self.text or "-" in self.text:
            number = count()
            start, stop, _ = slice(_bound(start_text, number), _bound(stop_text, number)).indices(number)
        else:
            start, stop = _bound(start_text, 0) or 0, _bound(stop_text, 0)
        if self.most is not None:
            stop = start + self.most if stop is None else min(stop, start + self.most)
        return start, stop


def _bound(text: str, number: int) -> int | None:
    """A bound as a number of rows; per cent to the nearest row, as `datasets` has it. number: of all rows."""
    if not text:
        return None
    if text.endswith("%"):
        return round(Fraction(text[:-1]) * number / 100)
    return int(text)


@dataclass(frozen=True)
class Chosen:
    """Some rows of what `paths` name, one source."""

    paths: Any
    rows: Slice


@dataclass(frozen=True)
class Mapped:
    """Rows of a source that a function has made (`row_map.py`), in memory. name: of the source."""

    rows: list[Row]
    name: str


@dataclass
class Taking:
    """Counts the rows of a source as they come. start, stop: as of `Slice.bounds`."""

    start: int = 0
    stop: int | None = None
    number: int = 0

    def takes(self) -> bool:
        """Whether the next row is wanted."""
        self.number += 1
        return self.number > self.start and not (self.stop is not None and self.number > self.stop)

    @property
    def is_over(self) -> bool:
        """Whether no further row is wanted, so that none need be read."""
        return self.stop is not None and self.number >= self.stop
