"""What a command sends to a model: as conversations or as plain text, and the rows of a file of prompts.

Owns: the choice between the two, its words, reading such a file. Does not own: what a run records of it (`run.asking`),
the template.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshlora.reading.chat import CONVERSATIONS, TEXTS
from meshlora.reading.conversations import checked_tools, open_conversation
from meshlora.reading.prompt_styles import STYLES
from meshlora.reading.records import MalformedError, Record, checked_text, json_type, listed
from meshlora.run.agreement import one_day
from meshlora.run.asking import Asking, asking_of
from meshlora_ground.errors import UserError, one_line, reason
from meshlora_ground.reading import parse_json, read_text

_MOST_BYTES = 2**28
_KNOWN = {"prompt", "messages"}


@dataclass(frozen=True)
class Question:
    """One prompt. asked: a text or a conversation. row: as it was given. name: for messages."""

    asked: str | Record
    row: dict[str, Any]
    name: str


def asking_for(options: argparse.Namespace) -> Asking:
    """How the model of a command is asked: as its adapter's run did, but for what the options say."""
    asking = asking_of(Path(options.adapter) if options.adapter else None, model=options.model)
    if options.chat_template is not None:
        given = options.chat_template
        asking = dataclasses.replace(asking, chat_template=given, template_of=given)
    if getattr(options, "separator", None) is not None:
        asking = dataclasses.replace(asking, separator=options.separator)
    if options.system is not None:
        asking = dataclasses.replace(asking, system=options.system)
    return asking


def with_day(asking: Asking) -> Asking:
    """With today where no run has said another day. Every rank calls it, as all take that of rank 0."""
    today = one_day()
    return dataclasses.replace(asking, day=asking.day or today)


def is_conversation(options: argparse.Namespace, asking: Asking) -> bool:
    """Whether texts are sent as what a user says. Raises: UserError: options that exclude each other."""
    given = {"--system": options.system, "--chat-template": options.chat_template, "--chat": options.chat}
    asked = [name for name, value in given.items() if value]
    if options.plain and asked:
        raise UserError(f"--plain with {asked[0]}", "plain text has no turns and no template", "leave out one of them")
    if options.plain:
        return False
    return bool(asked) or asking.form == CONVERSATIONS


def questions_of(options: argparse.Namespace, system: str, *, is_chat: bool) -> list[Question]:
    """The prompts of a command, in order. system: of conversations that have none. Raises: UserError: a file or row
    that cannot be used."""
    found = []
    for prompt in options.prompt or ():
        name = f"--prompt {prompt[:80]!r}"
        found.append(_question(prompt, {"prompt": prompt}, name, system, is_chat=is_chat))
    if options.prompts is None:
        return found
    try:
        lines = read_text(Path(options.prompts), most_bytes=_MOST_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"--prompts {options.prompts}", f"it cannot be read ({reason(error)})") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            name = f"{options.prompts}:{number}"
            found.append(_of_line(line, name, system, is_chat=is_chat, is_plain=options.plain))
    if not found:
        raise UserError(f"--prompts {options.prompts}", "it has no prompt", "give one a line, as JSON")
    return found


def _of_line(line: str, name: str, system: str, *, is_chat: bool, is_plain: bool) -> Question:
    try:
        row = parse_json(line)
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, dict):
            raise MalformedError(f"it is {json_type(row)}, neither a text nor an object")
        if len(_KNOWN & row.keys()) != 1:
            raise MalformedError(f"it has {listed(row.keys())}; one of prompt and messages is needed")
        if "text" in row:
            raise MalformedError("it has a field text, which is what the answer is written to")
        (field,) = _KNOWN & row.keys()
        if field == "prompt" and isinstance(row[field], str):
            asked = checked_text(row[field], field)
            return _question(asked, row, name, system, is_chat=is_chat)
        messages, _ = open_conversation(row[field], field)
        tools = checked_tools(row["tools"]) if row.get("tools") is not None else None
    except ValueError as error:  # of JSON, and malformed rows
        rule, way_out = str(error), 'give "TEXT", {"prompt": "TEXT"} or {"messages": [...]}'
        raise UserError(name, rule, way_out) from None
    if is_plain:
        raise UserError(f"{name}: messages with --plain", "plain text has no turns", "leave out --plain")
    return Question(Record(messages=_with_system(messages, system), tools=tools, origin=name), row, name)


def _question(text: str, row: dict[str, Any], name: str, system: str, *, is_chat: bool) -> Question:
    if not is_chat:
        return Question(text, row, name)
    messages = _with_system(({"role": "user", "content": text},), system)
    return Question(Record(messages=messages, origin=name), row, name)


def _with_system(messages: tuple[dict[str, Any], ...], system: str) -> tuple[dict[str, Any], ...]:
    """With a turn of the system, if it has none."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return messages
    return ({"role": "system", "content": system}, *messages)


def in_style(questions: list[Question], style: str) -> list[Question]:
    """With the words of `data.prompt` around those that are texts, as the adapter's training had them."""
    write, _ = STYLES[style]
    found = []
    for each in questions:
        asked = write(each.asked, "") if isinstance(each.asked, str) else each.asked
        found.append(dataclasses.replace(each, asked=asked))
    return found


def how_it_is_sent(questions: list[Question], asking: Asking, *, is_plain: bool) -> str:
    """In one line. is_plain: it was asked for."""
    chats = sum(isinstance(each.asked, Record) for each in questions)
    template = f"chat template of {asking.template_of}"
    if asking.system:
        template += f", system: {one_line(asking.system, 60)}"
    if chats == len(questions):
        return f"sent as a conversation: {template}"
    if chats:
        return f"{chats} of {len(questions)} sent as conversations: {template}; the others as plain text"
    if is_plain:
        return "sent as plain text"
    why = "; --chat sends it as a conversation, through the chat template"
    if asking.style:
        why = f" in the style {asking.style}, as the adapter was trained; --plain sends it as it is"
    elif asking.form == TEXTS:
        why = ", as the adapter was trained; --chat sends it as a conversation"
    return f"sent as plain text{why}"
