"""The turn of the system of conversations that have none: `data.system`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from meshlora.reading.records import Record, quoted
from meshlora_ground.errors import UserError


def with_system(
    records: Iterable[Record], text: str | None, say: Callable[[str], None] | None = None
) -> Iterator[Record]:
    """The records, with `text` as the first turn of conversations in which the system says nothing.

        list(with_system(records, "Be kind."))

    text: None: the records as they are. say: told where no conversation lacks such a turn.

    Raises:
        UserError: at the end, no record is a conversation.
    """
    if text is None:
        yield from records
        return
    number, lacking = 0, 0
    for record in records:
        number += record.messages is not None
        if _lacks_one(record):
            lacking += 1
            turn = {"role": "system", "content": text}
            record = dataclasses.replace(record, messages=(turn, *(record.messages or ())))
        yield record
    given = f"data.system={quoted(text)}"
    if not number:
        rule = "no record is a conversation, and only conversations have a turn of the system"
        raise UserError(given, rule, "leave it out, or let data.columns name user and assistant")
    if not lacking and say is not None:
        say(f"{given}: all {number:,} conversations have their own")


def _lacks_one(record: Record) -> bool:
    if record.messages is None:
        return False
    return all(message["role"] not in ("system", "developer") for message in record.messages)
