"""The fields of rows: which kind of record a row is, and its content.

Owns: names of fields and their values. Does not own: reading rows (`sources.py`), messages (`conversations.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

from meshlora.common.errors import UserError, did_you_mean
from meshlora.data.conversations import checked_messages, checked_tools
from meshlora.data.records import FIELDS, KINDS, MalformedError, Record, checked_text, quoted


def chosen_fields(columns: Mapping[str, str] | None) -> dict[str, str] | None:
    """Our field -> the user's column, completed: naming only `prompt` leaves `completion` under its own name.

    Returns None if the user chose nothing: rows must then have exactly our names.

    Raises:
        UserError: an unknown field, or fields of two kinds.
    """
    if not columns:
        return None
    for name in columns:
        if name not in FIELDS:
            raise UserError(f"columns: {name!r}", "is not a field of a record", did_you_mean(name, FIELDS))
    kinds = [kind for kind, names in KINDS.items() if any(name in columns for name in names)]
    if len(kinds) > 1:
        raise UserError(
            f"columns for {', '.join(columns)}",
            "name more than one kind of record",
            "choose one of text, (prompt and completion), messages",
        )
    return {name: columns.get(name, name) for name in KINDS[kinds[0]]}


def select_fields(names: Collection[str], chosen: Mapping[str, str] | None) -> dict[str, str]:
    """Our field -> the row's key, for a row (or a table) with these `names`.

    With `chosen`, all other columns are ignored: the user selected the columns. Without, an unknown field is an error,
    as it may be meant to have an effect (a weight, a misspelt `completion`).

    Raises:
        MalformedError: a field is missing, unknown, or of another kind than the rest.
    """
    if chosen is not None:
        for ours, theirs in chosen.items():
            if theirs not in names:
                some = list(itertools.islice(names, 100))
                raise MalformedError(f"no column {theirs!r} (for {ours}); {did_you_mean(theirs, some)}")
        return dict(chosen)
    # The LoRA paper's files call the prompt `context`.
    keys = {("prompt" if name == "context" and "prompt" not in names else name): name for name in names}
    for name in keys:
        if name not in FIELDS and not (name == "tools" and "messages" in keys):
            raise MalformedError(f"unknown field {quoted(name)}; {did_you_mean(name[:60], FIELDS)}")
    kinds = [kind for kind, fields in KINDS.items() if any(name in keys for name in fields)]
    if not kinds:
        raise MalformedError("no field")
    if len(kinds) > 1:
        raise MalformedError(f"has {' and '.join(sorted(keys))}, which are different kinds of record")
    for name in KINDS[kinds[0]]:
        if name not in keys:
            raise MalformedError(f"{name!r} is missing")
    return keys


def build_record(row: Mapping[str, Any], *, origin: str) -> Record:
    """The record of a row with the fields of one kind.

    Raises:
        MalformedError: a value is of the wrong type, empty, or not a conversation.
    """
    if "messages" in row:
        tools = checked_tools(row["tools"]) if row.get("tools") is not None else None
        return Record(messages=checked_messages(row["messages"]), tools=tools, origin=origin)
    values = {name: checked_text(value, name) for name, value in row.items()}
    for name, value in values.items():
        # A prompt may be empty: unconditional generation.
        if name != "prompt" and not value.strip():
            raise MalformedError(f"empty {name}")
    return Record(
        text=values.get("text"), prompt=values.get("prompt"), completion=values.get("completion"), origin=origin
    )
