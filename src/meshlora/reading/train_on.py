"""Which turns of a record are trained: `data.train_on`.

Owns: the option's values, and the messages that they choose. Does not own: where a message's text lies in a rendered
conversation (`chat.py`), its tokens (`tokenization.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from meshlora.reading.conversations import REASONING, ROLES
from meshlora.reading.records import Record
from meshlora_ground.errors import UserError, did_you_mean

Named = Literal["all", "last", "everything"]
# "all": every answer. "last": the last turn of the assistant alone. "everything": all tokens, those of prompts too. Or
# the roles whose turns are trained: a prompt is the user's, a completion the assistant's.
TrainOn = Named | Sequence[str]


def check_train_on(train_on: TrainOn) -> None:
    """Raises: UserError: it is none of the names, and no list of roles, each once."""
    if isinstance(train_on, str):
        if train_on not in get_args(Named):
            near = did_you_mean(train_on, get_args(Named))
            raise UserError(f"data.train_on={train_on!r}", "it is no such choice", f"{near}, or a list of roles")
        return
    for role in train_on:
        if role not in ROLES:
            raise UserError(f"data.train_on: {role!r}", "it is no role", did_you_mean(str(role)[:60], ROLES))
    if not train_on or len(set(train_on)) < len(train_on):
        raise UserError(f"data.train_on={list(train_on)}", "it names one role or more, each once")


def is_of(role: str, train_on: TrainOn) -> bool:
    """Whether turns of `role` are among the trained ones, the last of them at least."""
    if isinstance(train_on, str):
        return role == "assistant" or train_on == "everything"
    return role in train_on


def chosen(messages: Sequence[Mapping[str, Any]], train_on: TrainOn) -> list[int]:
    """The indices of the messages to train; of "everything" those of the assistant."""
    roles = ("assistant",) if isinstance(train_on, str) else tuple(train_on)
    found = [index for index, message in enumerate(messages) if message["role"] in roles]
    if train_on == "last":
        return found[-1:]
    return found


def is_empty(message: Mapping[str, Any]) -> bool:
    """Whether a turn says nothing: it has neither text nor image, and calls nothing."""
    if message.get("tool_calls"):
        return False
    content = message.get("content")
    said = [content, *map(message.get, REASONING)]
    if isinstance(content, list):
        said[:1] = [part.get("text", part) for part in content]  # an image stands for itself
    return not any(each.strip() if isinstance(each, str) else each for each in said)


def without_empty(records: Iterable[Record], train_on: TrainOn, say: Callable[[str], None] | None) -> Iterator[Record]:
    """The records, of which no empty answer is trained, and without those of which nothing is left to train. say: told
    how many these are.

    Raises:
        UserError: all are.
    """
    first, number, left = "", 0, 0
    for record in records:
        messages = list(record.messages or ())
        for place in chosen(messages, "all"):
            if is_empty(messages[place]):
                messages[place] = {**messages[place], "weight": 0}
        wanted = {*chosen(messages, train_on)}
        if wanted and train_on != "everything" and wanted.issubset(left_out(messages)):
            first, number = first or record.origin, number + 1
            continue
        left += 1
        if messages:
            record = dataclasses.replace(record, messages=tuple(messages))
        yield record
    given = f"{number:,} records, {first} first"
    if not left:
        raise UserError(f"data.empty_answers=skip: {given}", "no answer says anything", "train them, or other data")
    if number and say is not None:
        say(f"{given}: left out, as no trained answer says anything (data.empty_answers: skip)")


def left_out(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The indices of the messages that are never trained, whatever else is."""
    return [index for index, message in enumerate(messages) if message.get("weight") == 0]
