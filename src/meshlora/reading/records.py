"""Training examples before tokenisation, and what is said of rows that are none.

Owns: `Record`, the joint report of malformed rows, and grouping records by prompt as references for scores of generated
text. Does not own: the fields of rows (`formats.py`), messages (`conversations.py`), reading (`sources.py`), or
tokenisation (`tokenization.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from meshlora_ground.errors import UserError

_KINDS = ({"text"}, {"prompt", "completion"}, {"messages"}, {"tokens"})
_FIELDS = ("text", "prompt", "completion", "messages", "tokens")
MAX_SHOWN = 5  # places that a message names for one mistake
_MAX_COUNTED = 1000  # a file of another kind has a mistake in every line: reading on would not tell more
_LARGEST = float(np.finfo(np.float32).max)
_NUMBERED = re.compile(r"(.*\D)(\d+)")  # a place: where it is, and its number there
_MAX_WORDS = 300  # characters of the message about one row


@dataclass(frozen=True, kw_only=True)
class Record:
    """One example: exactly one of `text`, (`prompt`, `completion`), `messages`, `tokens`.

    A space or newline that joins `prompt` and `completion` is part of one of the two, but for the separator.

    Args:
        text: a document; every token is trained.
        prompt: the input of the model; may be empty.
        completion: the answer to train.
        messages: a conversation of `{"role", "content"}` dicts. Content is text, or a list of parts
            `{"type": "text", "text": ...}` and `{"type": "image", "image": path}`; a turn with `tool_calls` may have
            none. An assistant turn with `weight: 0` is not trained.
        tools: functions that a conversation may call, as `apply_chat_template` takes them.
        tokens: ids, and whether each is trained; nothing is added to them.
        separator: between prompt and completion; special tokens may be spelt.
        is_seen: whether its category is one of WebNLG's training data; None: of other data. Not part of the content.
        origin: its source for error messages (`train.jsonl:17`, `dataset row 17`). Not part of the content: records
            that differ only in it give the same tokens and share a cache.

    Raises:
        UserError: none, or more than one, of the four is given.
    """

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    tokens: tuple[tuple[int, ...], tuple[bool, ...]] | None = None
    separator: str = ""
    is_seen: bool | None = None
    origin: str

    def __post_init__(self) -> None:
        given = {name for name in _FIELDS if getattr(self, name) not in (None, ())}  # an empty prompt is one
        if given not in _KINDS:
            rule = "must have exactly one of text, (prompt and completion), messages, tokens"
            raise UserError(f"{self.origin}: a record with {', '.join(sorted(given)) or 'no field'}", rule)
        if self.tools and self.messages is None:
            raise UserError(f"{self.origin}: a record with tools", "only conversations have them", "give messages")

    @property
    def kind(self) -> Literal["text", "completion", "messages", "tokens"]:
        if self.tokens is not None:
            return "tokens"
        if self.text is not None:
            return "text"
        return "completion" if self.completion is not None else "messages"

    @property
    def images(self) -> list[str]:
        """The paths of its images, in order."""
        found = []
        for message in self.messages or ():
            content = message.get("content")
            if isinstance(content, list):
                found += [part["image"] for part in content if is_image(part)]
        return found


def is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def without_paths(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the paths of its images, as chat templates get it: where a file lies is no content."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = content.copy()
    for place, part in enumerate(parts):
        if is_image(part):
            parts[place] = {"type": "image"}
    return {**message, "content": parts}


class MalformedError(ValueError):
    """A row is not a valid record; the message says why, the caller adds where."""


class LeftOutError(ValueError):
    """A row is valid and says nothing to train; the message says why."""


@dataclass
class Problems:
    """Collects malformed rows, to show several at once, each mistake once. what: the form of a row. skips: they are
    passed over.
    """

    what: str = "of a format that is known by its fields (docs/data.md)"
    skips: bool = False
    num: int = 0
    _found: dict[str, _Mistake] = field(default_factory=dict)  # by what is wrong

    def add(self, origin: str, reason: object, help: str = "") -> None:
        """Add one. help: what may mend it. Raises: UserError: there are so many that reading the rest is pointless."""
        self.num += 1  # those that are not shown, too
        words = str(reason)
        if len(words) > _MAX_WORDS:
            words = f"{words[:_MAX_WORDS]} …"
        if words in self._found or len(self._found) < MAX_SHOWN:
            self._found.setdefault(words, _Mistake(help)).add(origin)
        if self.num >= _MAX_COUNTED and not self.skips:
            self.raise_if_any()

    def lines(self) -> list[str]:
        """A line for each of the first mistakes, with its first places and how many there are."""
        found, number = list[str](), 0
        for words, mistake in self._found.items():
            found.append(f"{mistake.where()}: {words}")
            if mistake.help:
                found.append(f"  perhaps {mistake.help}")
            number += mistake.num
        if self.num > number:
            found.append(f"and {self.num - number} more")
        return found

    def raise_if_any(self) -> None:
        """Raises: UserError with the first places and the total number."""
        if not self.num:
            return
        lines = self.lines()
        or_more = " or more" * (self.num >= _MAX_COUNTED)  # the rest was not read
        given = f"{self.num}{or_more} malformed record{'s' * (self.num > 1)}"
        rule = f"each must be {self.what}"
        raise UserError(given, rule, "\n  ".join(["correct them, or name the columns to use in data.columns:", *lines]))


@dataclass
class _Mistake:
    """One mistake of one row or several. places: the first of them."""

    help: str
    places: list[str] = field(default_factory=list)
    num: int = 0

    def add(self, origin: str) -> None:
        self.num += 1
        if len(self.places) < MAX_SHOWN:
            self.places.append(origin)

    def where(self) -> str:
        """`a.jsonl:1, 2, 3, b.jsonl:1, 2 and 12 more`: what is as in the place before is left out."""
        words, before = list[str](), None
        for place in self.places:
            found = _NUMBERED.fullmatch(place)
            file, number = (found[1], found[2]) if found else (place, "")
            words.append(number if found and file == before else place)
            before = file
        more = f" and {self.num - len(words)} more" if self.num > len(words) else ""
        return ", ".join(words) + more


def listed(names: Collection[str]) -> str:
    """The first ten of untrusted names."""
    shown = []
    for name in itertools.islice(names, 10):
        is_plain = name.isidentifier() and len(name) <= 60
        shown.append(name if is_plain else quoted(name))
    words = ", ".join(shown)
    if len(names) > 10:
        words += f" and {len(names) - 10} more"
    return words


def quoted(text: str, longest: int = 60) -> str:
    """Untrusted text as a literal of bounded length."""
    if len(text) > longest:
        text = f"{text[:longest]}…"
    return repr(text)


def checked_text(value: object, name: str) -> str:
    """`value`, if it is a string that UTF-8 can spell. Raises: MalformedError."""
    if not isinstance(value, str):
        raise MalformedError(f"{name} is {json_type(value)}, not a string")
    try:
        value.encode()  # for its error alone
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair; no tokenizer accepts it.
        raise MalformedError(f"{name} holds a lone surrogate at character {error.start}") from None
    return value


def filled_text(value: object, name: str) -> str:
    """As `checked_text`, and more than spaces. Raises: MalformedError."""
    text = checked_text(value, name)
    if not text.strip():
        raise MalformedError(f"empty {name}")
    return text


@dataclass(frozen=True)
class Prompt:
    """An input of the model with its reference answers: a text, or the record of a conversation that leads to them.
    origin: of its first record.
    """

    text: str | None
    references: tuple[str, ...]
    origin: str
    chat: Record | None = None


def prompts_of(records: Sequence[Record]) -> list[Prompt]:
    """One prompt per different `prompt`, or conversation before its last answer, in the order of their first records;
    the stripped completions, or last answers, of all records with it are its references.

    Raises:
        UserError: a record has neither prompt and completion nor messages, or its last answer has no text.
    """
    grouped: dict[str, tuple[Record, list[str]]] = {}
    for record in records:
        asked = asked_of(record)
        # As JSON, since messages are dicts, which nothing can look up.
        key = json.dumps([asked.prompt, asked.messages and [*map(without_paths, asked.messages)], asked.tools])
        _, references = grouped.setdefault(key, (asked, []))
        references.append(_answer_of(record).strip())
    prompts = []
    for asked, references in grouped.values():
        chat = None if asked.messages is None else asked
        prompts.append(Prompt(asked.prompt, tuple(references), asked.origin, chat))
    return prompts


def asked_of(record: Record) -> Record:
    """The record; of a conversation what is before its last answer. Raises: UserError: nothing, or it asks nothing."""
    if record.messages is None:
        if record.prompt is None or record.completion is None:
            raise _unasked(record, f"a record of {record.kind}")
        return record
    asked = record.messages[: _last_answer(record)]
    if not asked:
        raise _unasked(record, "a conversation that begins with its last answer")
    return dataclasses.replace(record, messages=asked)


def _last_answer(record: Record) -> int:
    last = 0
    for place, message in enumerate(record.messages or ()):
        if message["role"] == "assistant":
            last = place
    return last


def _answer_of(record: Record) -> str:
    if record.messages is None:
        return record.completion or ""
    content = record.messages[_last_answer(record)].get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if not content:
        raise _unasked(record, "a conversation whose last answer has no text")
    return str(content)


def _unasked(record: Record, what: str) -> UserError:
    rule = "only prompts and conversations that are answered say what a generated text is compared with"
    way_out = "give such a file with --data, or leave out --generate and generate.metrics"
    return UserError(f"{record.origin}: {what}", rule, way_out)


def is_number(value: Any) -> bool:
    """Whether `value` is finite in float32. NaN fails any comparison; `float` of a huge integer would overflow."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def json_type(value: object) -> str:
    """The JSON name of a value's type: `a string`, `an object`, `null`."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    names |= {list: "a list", tuple: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
