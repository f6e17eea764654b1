"""Text that others wrote, made fit to be read: without control characters, of bounded length.

Owns: how a character that a terminal would obey is shown, and where a long text is cut. Does not own: which texts are
shown where (`common.errors`, `common.console`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# What a terminal obeys instead of showing it, but for newline and tab: C0, DEL, C1; what some read as the end of a
# line, or what turns the order of characters round; halves of surrogate pairs, which cannot be written at all.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_CUT = " … "


def printable(text: str) -> str:
    r"""`text` with control characters in Python's spelling: `\x1b`. Newlines and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str, limit: int) -> str:
    """The beginning of `text` on one line of at most `limit` characters."""
    line = printable(" ".join(text[: 8 * limit].split()))
    if len(line) <= limit and len(text) <= 8 * limit:
        return line
    head = line[: limit - 2]
    words = head.rpartition(" ")[0]  # whole ones, where they are not too long
    return f"{words if 2 * len(words) > limit else head} …"


def shortened(text: str, limit: int, *, head: int | None = None) -> str:
    """`text` without its middle, in `limit` characters, of which the first `head` (two thirds) are its beginning."""
    if len(text) <= limit:
        return text
    kept = limit - len(_CUT)
    begin = 2 * kept // 3 if head is None else head
    return f"{text[:begin]}{_CUT}{text[len(text) - (kept - begin) :]}"


def fitted(parts: Sequence[str], room: int) -> list[str]:
    """`parts`, the longest of them shortened to one length, so that together they have at most `room` characters."""
    left, limit = room, room
    for number, length in enumerate(sorted(map(len, parts))):
        limit = left // (len(parts) - number)
        if length > limit:
            break
        left -= length
        limit = room
    return [shortened(part, limit) for part in parts]
