"""What the files of an adapter say against it: each finding in its own words, with the names concerned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from meshlora_ground.errors import one_line

_SHOWN, _LONGEST = 3, 200


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Attributes:
        kind: a word for programs. what: in words. names: modules or keys concerned. way_out: what to do.
        is_note: worth saying, but a sound adapter may have it, too.
    """

    kind: str
    what: str
    names: tuple[str, ...] = ()
    way_out: str = ""
    is_note: bool = False

    def __str__(self) -> str:
        text = self.what
        if self.names:
            shown = ", ".join(one_line(name, _LONGEST) for name in self.names[:_SHOWN])
            more = len(self.names) - _SHOWN
            text += f" ({len(self.names):,}: {shown}{f' and {more:,} more' if more > 0 else ''})"
        return f"{text}; {self.way_out}" if self.way_out else text

    def as_json(self) -> dict[str, Any]:
        """All of it, with every name."""
        return {"kind": self.kind, "what": self.what, "names": list(self.names), "way_out": self.way_out}


def found(kind: str, what: str, names: Iterable[str], way_out: str = "", *, is_note: bool = False) -> list[Finding]:
    """One finding about `names`, or none where there are none."""
    ordered = tuple(dict.fromkeys(names))
    return [Finding(kind, what, ordered, way_out, is_note)] if ordered else []
