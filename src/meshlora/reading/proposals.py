"""What a user may have meant by the columns of a file of no known format: a line to paste.

Owns: guesses, by names and by what stands in a row. They are proposed and never taken.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_ASKED = frozenset(
    {"question", "query", "prompt", "instruction", "input", "inputs", "problem", "user", "human", "request", "source"}
    | {"task", "document", "article"}
)
_ANSWERED = frozenset(
    {"answer", "response", "output", "outputs", "completion", "target", "targets", "reply", "assistant", "solution"}
    | {"summary", "gpt", "bot"}
)
_BETTER = frozenset({"chosen", "better", "preferred", "good", "win", "winner", "accepted"})
_WORSE = frozenset({"rejected", "worse", "dispreferred", "bad", "lose", "loser"})
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*")  # a name that YAML and a shell take as it is


def proposed(row: Mapping[str, Any], fields: Collection[str]) -> str:
    """A setting of `data.columns` for a row with these values, or None for unknown ones; "" without a guess.

        proposed({"ask": "1?", "reply": "2"}, fields)  # "--set 'data.columns={user: ask, assistant: reply}'"

    fields: that `data.columns` can name here.
    """
    names = [name for name in row if _PLAIN.fullmatch(name)]
    columns = _meant(row, names, fields)
    if not columns or not {*columns} <= {*fields}:
        return ""
    words = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
    return f"--set 'data.columns={{{words}}}'"


def _meant(row: Mapping[str, Any], names: Sequence[str], fields: Collection[str]) -> dict[str, str]:
    asked, answered = _first(names, _ASKED), _first(names, _ANSWERED)
    if "chosen" in fields:
        better, worse = _first(names, _BETTER), _first(names, _WORSE)
        if not better or not worse:
            return {}
        columns = {"chosen": better, "rejected": worse}
        if asked:
            columns = {"question": asked, **columns}
        return columns
    for name in names:
        if _are_turns(row[name]):
            return {"messages": name}
    if asked and answered:
        return {"user": asked, "assistant": answered}
    texts = [name for name in names if isinstance(row[name], str)]
    if len(texts) == 2:
        return {"user": texts[0], "assistant": texts[1]}
    if len(texts) == 1:
        return {"text": texts[0]}
    return {}


def _first(names: Sequence[str], words: Collection[str]) -> str:
    """The first name that one of the words is part of; "" if there is none."""
    for name in names:
        if not {*re.split(r"[^a-z]+", name.lower())}.isdisjoint(words):
            return name
    return ""


def _are_turns(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or not value or not isinstance(value[0], Mapping):
        return False
    return {"role", "content"} <= value[0].keys() or {"from", "value"} <= value[0].keys()
