"""Training examples before tokenisation, and the rules for the rows they are read from.

Owns: `Record`, the fields of a row and their values, the joint report of malformed rows, and
grouping records by prompt as references for scores of generated text.
Does not own: reading rows (`sources.py`), or tokenisation (`tokenization.py`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from meshlora.common.errors import UserError, did_you_mean

# The three kinds of record, each with the fields it needs.
KINDS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "completion": ("prompt", "completion"),
    "messages": ("messages",),
}
FIELDS = tuple(name for names in KINDS.values() for name in names)
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_SHOWN = 5  # places that a message names for one mistake
_MAX_COUNTED = 1000  # a file of another kind has a mistake in every line: reading on would not tell more
_MAX_WORDS = 300  # characters of the message about one row


@dataclass(frozen=True, kw_only=True)
class Record:
    """One example: exactly one of `text`, (`prompt`, `completion`), `messages`.

    Nothing is added between `prompt` and `completion`: a space or newline that joins them is part of one of the two.

    Args:
        text: a document; every token is trained.
        prompt: the input of the model; may be empty.
        completion: the answer to train.
        messages: a conversation of `{"role", "content"}` dicts. Content is text, or a list of parts
            `{"type": "text", "text": ...}` and `{"type": "image", "image": path}`.
        origin: its source for error messages (`train.jsonl:17`, `dataset row 17`). Not part of the content: records
            that differ only in it give the same tokens and share a cache.

    Raises:
        UserError: none, or more than one, of the three is given.
    """

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    origin: str

    def __post_init__(self) -> None:
        given = {name for name in FIELDS if getattr(self, name) not in (None, ())}
        if given not in ({"text"}, {"prompt", "completion"}, {"messages"}):
            raise UserError(
                f"{self.origin}: a record with {', '.join(sorted(given)) or 'no field'}",
                "must have exactly one of text, (prompt and completion), messages",
            )

    @property
    def kind(self) -> Literal["text", "completion", "messages"]:
        if self.text is not None:
            return "text"
        return "completion" if self.completion is not None else "messages"

    @property
    def images(self) -> list[str]:
        """The paths of its images, in order."""
        contents = (message["content"] for message in self.messages or ())
        return [
            part["image"] for content in contents if isinstance(content, list) for part in content if is_image(part)
        ]


def is_image(part: object) -> bool:
    """Whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") == "image"


def without_paths(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the paths of its images, as chat templates get it: where a file lies is no content."""
    if isinstance(message["content"], str):
        return message
    return {**message, "content": [{"type": "image"} if is_image(part) else part for part in message["content"]]}


class MalformedError(ValueError):
    """A row is not a valid record; the message says why, the caller adds where."""


@dataclass
class Problems:
    """Collects malformed rows, so that a user sees several at once. what: the required form of a row."""

    what: str = "{text}, {prompt, completion} or {messages}, with non-empty strings"
    shown: list[str] = field(default_factory=list)
    num: int = 0

    def add(self, origin: str, reason: object) -> None:
        """Add one.

        Raises:
            UserError: there are so many that reading the rest is pointless.
        """
        self.num += 1
        if len(self.shown) < MAX_SHOWN:
            words = str(reason)
            self.shown.append(f"{origin}: {words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + ' …'}")
        if self.num >= _MAX_COUNTED:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raises: UserError with the first places and the total number."""
        if not self.num:
            return
        rest = f"\n  and {self.num - len(self.shown)} more" if self.num > len(self.shown) else ""
        raise UserError(
            f"{self.num}{' or more' if self.num >= _MAX_COUNTED else ''} malformed record{'s' if self.num > 1 else ''}",
            f"each must be {self.what}",
            "correct them, or name the columns to use in data.columns:"
            + "".join(f"\n  {line}" for line in self.shown)
            + rest,
        )


def listed(names: Collection[str]) -> str:
    """The first ten of untrusted names."""
    first = itertools.islice(names, 10)
    shown = ", ".join(name if name.isidentifier() and len(name) <= 60 else quoted(name) for name in first)
    return shown + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def quoted(text: str, longest: int = 60) -> str:
    """Untrusted text as a literal of bounded length."""
    return repr(text if len(text) <= longest else text[:longest] + "…")


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
        if name not in FIELDS:
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
        return Record(messages=_checked_messages(row["messages"]), origin=origin)
    values = {name: checked_text(value, name) for name, value in row.items()}
    for name, value in values.items():
        # A prompt may be empty: unconditional generation.
        if name != "prompt" and not value.strip():
            raise MalformedError(f"empty {name}")
    return Record(
        text=values.get("text"), prompt=values.get("prompt"), completion=values.get("completion"), origin=origin
    )


def checked_text(value: object, name: str) -> str:
    """`value`, if it is a string that UTF-8 can spell. Raises: MalformedError."""
    if not isinstance(value, str):
        raise MalformedError(f"{name} is {json_type(value)}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair; no tokenizer accepts it.
        raise MalformedError(f"{name} holds a lone surrogate at character {error.start}") from None
    return value


def _checked_messages(value: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, (list, tuple)):
        raise MalformedError(f"messages is {json_type(value)}, not a list")
    messages = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise MalformedError(f"{where} is {json_type(message)}, not an object")
        # Arrow gives every message of a column the same keys, with None where one had none.
        message = {key: item for key, item in message.items() if item is not None}
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            known = did_you_mean(role[:60], ROLES) if isinstance(role, str) else f"known: {', '.join(ROLES)}"
            given = quoted(role) if isinstance(role, str) else json_type(role)
            raise MalformedError(
                f"{where} has " + ("no role" if role is None else f"unknown role {given}") + f"; {known}"
            )
        if "content" not in message:
            raise MalformedError(f"{where} has no content")
        message["content"] = content = _checked_content(message["content"], f"{where}.content")
        if role == "assistant" and not (content.strip() if isinstance(content, str) else content):
            raise MalformedError(f"{where} is an assistant turn with empty content")
        if "weight" in message:
            _check_weight(message["weight"], role, where)
        try:
            json.dumps(message)
        except (TypeError, ValueError, RecursionError) as error:
            raise MalformedError(f"{where} holds what JSON cannot: {error}") from None
        messages.append(message)
    if all(message["role"] != "assistant" for message in messages):
        raise MalformedError("messages has no assistant turn to train on")
    return tuple(messages)


def _checked_content(value: object, where: str) -> str | list[dict[str, str]]:
    """Text, or parts of text and images."""
    if not isinstance(value, list):
        return checked_text(value, where)
    parts = []
    for index, part in enumerate(value):
        place = f"{where}[{index}]"
        if not isinstance(part, Mapping):
            raise MalformedError(f"{place} is {json_type(part)}, not an object")
        part = {key: item for key, item in part.items() if item is not None}  # Arrow's None, as above
        kind = part.get("type")
        if kind not in ("text", "image"):
            raise MalformedError(f"{place} has type {quoted(str(kind))}, not text or image")
        if set(part) != {"type", kind}:
            raise MalformedError(f"{place} has {listed(part)}; a part of {kind} has type and {kind}")
        parts.append({"type": kind, kind: checked_text(part[kind], f"{place}.{kind}")})
    return parts


def _check_weight(weight: object, role: str, where: str) -> None:
    """OpenAI's key: 0 for a turn that is not trained, else 1. No other weights exist there or here."""
    if role != "assistant":
        raise MalformedError(f"{where} has a weight, which only an assistant turn can have: no other is trained")
    if isinstance(weight, bool) or weight not in (0, 1):
        raise MalformedError(f"{where} has a weight that is neither 0 (not trained) nor 1 (trained)")


@dataclass(frozen=True)
class Prompt:
    """An input of the model with its reference answers. origin: of its first record."""

    text: str
    references: tuple[str, ...]
    origin: str


def prompts_of(records: Sequence[Record]) -> list[Prompt]:
    """One prompt per run of adjacent records with the same `prompt`; their stripped completions are its references.

    Raises:
        UserError: a record has no prompt and completion.
    """
    grouped: list[tuple[Record, list[str]]] = []
    for record in records:
        if record.prompt is None or record.completion is None:
            raise UserError(
                f"{record.origin}: a record of {record.kind}",
                "only records of prompt and completion say what a generated text is compared with",
                "give such a file with --data, or leave out --generate",
            )
        if not grouped or grouped[-1][0].prompt != record.prompt:
            grouped.append((record, []))
        grouped[-1][1].append(record.completion.strip())
    return [Prompt(first.prompt or "", tuple(references), first.origin) for first, references in grouped]


def json_type(value: object) -> str:
    """The JSON name of a value's type: `a string`, `an object`, `null`."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    names |= {list: "a list", tuple: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
