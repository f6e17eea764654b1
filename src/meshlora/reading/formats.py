"""The formats in which people have their rows: how each is known by its fields, and what is read of it.

Owns: names of formats, their fields and aliases, which columns are not read, and what a row becomes. Does not own:
messages (`conversations.py`), reading rows (`sources.py`), what objectives add (`preferences.py`, `rollouts.py`).

A format is known by the fields that it needs: a row that has them is of that format, whatever else it has. What else it
has is not read, and said; unless it could have an effect on what is trained, like a weight: then it is refused.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from meshlora.reading.conversations import checked_messages, checked_tools, untrained
from meshlora.reading.nlg import context_record
from meshlora.reading.records import MalformedError, Record, checked_text, json_type, quoted
from meshlora_ground.errors import UserError, did_you_mean

Made = TypeVar("Made")
Row = Mapping[str, Any]

# Columns that say something about the training, wherever they are not read.
_MATTERS = frozenset(
    {
        *("weight", "weights", "train", "training", "loss_mask", "is_trained", "labels", "completion_mask"),
        *("assistant_masks", "advantage", "advantages", "old_log_probs", "engine_log_probs", "routed_experts"),
        *(
            "context",
            "system",
            "history",
            "tools",
            "functions",
            "image",
            "images",
            "video",
            "videos",
            "audio",
            "audios",
        ),
    }
)
_NEAR = 0.8  # of `difflib`: a column is a misspelt field
_MANY = 100  # columns, beyond which misspelt ones are not looked for


@dataclass(frozen=True)
class Format(Generic[Made]):
    """One format.

    Attributes:
        needs: fields that a row must have. may: fields that are read where a row has them.
        make: (the row's fields, origin) -> what is read; raises MalformedError.
        is_weak: another format that fits goes before: a `text` often stands beside what it was made of.
        aliases: other name -> field. takes_rest: all other fields are read, too, under their own names.
    """

    name: str
    needs: tuple[str, ...]
    make: Callable[[dict[str, Any], str], Made]
    may: tuple[str, ...] = ()
    is_weak: bool = False
    aliases: Mapping[str, str] | None = None
    takes_rest: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        return self.needs + self.may


@dataclass(frozen=True)
class Choice(Generic[Made]):
    """How to read rows with certain names. keys: field -> name in the row. unread: the other names.

    refused: those of them that must be empty.
    """

    format: Format[Made]
    keys: Mapping[str, str]
    unread: tuple[str, ...]
    refused: tuple[str, ...]

    def make(self, row: Row, origin: str) -> Made:
        """Raises: MalformedError."""
        for name in self.refused:
            if row.get(name) not in (None, "", [], {}):
                known = f"{self.format.name} rows have {', '.join(self.format.fields)}"
                raise MalformedError(
                    f"{quoted(name)} may say something about the training, and would not be read ({known}); "
                    "leave it out, or say in data.columns which columns to read"
                )
        needed = self.format.needs
        values = {field: row.get(name) for field, name in self.keys.items()}
        return self.format.make(
            {field: value for field, value in values.items() if value is not None or field in needed}, origin
        )


class Formats(Generic[Made]):
    """The formats of one kind of data, with what a user says of them.

    Args:
        given: `data.format`: a name, or "auto". columns: our field -> theirs.

    Raises:
        UserError: a format or a field that these data do not have, or fields of several formats.
    """

    def __init__(self, known: Sequence[Format[Made]], given: str, columns: Mapping[str, str] | None) -> None:
        self.columns, self.is_chosen = dict(columns or {}), given != "auto" or bool(columns)
        names = list(dict.fromkeys(each.name for each in known))
        if given != "auto" and given not in names:
            rule = "train.objective reads other records"
            raise UserError(f"data.format={given}", rule, f"one of auto, {', '.join(names)}")
        formats = [each for each in known if given in ("auto", each.name)]
        every = list(dict.fromkeys(name for each in formats for name in each.fields))
        for name in self.columns:
            if name not in every:
                raise UserError(
                    f"columns: {quoted(name)}", "is not a field of a record", did_you_mean(name[:60], every)
                )
        self.formats = [each for each in formats if set(self.columns) <= set(each.fields)]
        if not self.formats:
            raise UserError(
                f"columns for {', '.join(self.columns)}",
                "name more than one kind of record",
                "choose the fields of one: " + "; ".join(f"{each.name}: {', '.join(each.fields)}" for each in formats),
            )
        self.choice = functools.lru_cache(64)(self._choice)  # most rows have the same names

    def _choice(self, names: tuple[str, ...]) -> Choice[Made]:
        """How rows with these names are read.

        Raises:
            MalformedError: a field is missing or misspelt, or several formats fit.
        """
        there = frozenset(names)
        fitting = [(each, keys) for each in self.formats if set(each.needs) <= set(keys := self._keys(each, there))]
        if len(fitting) > 1:
            fitting = [(each, keys) for each, keys in fitting if not each.is_weak] or fitting[:1]
        if not fitting:
            raise MalformedError(self._why_none(names))
        if len(fitting) > 1:
            kinds = [f"{each.name} ({', '.join(each.needs)})" for each, _ in fitting]
            raise MalformedError(
                f"has the fields of different kinds of record, {' and '.join(kinds)}; say which in data.format"
            )
        ((found, keys),) = fitting
        keys = dict(sorted(keys.items(), key=lambda item: names.index(item[1])))
        unread = tuple(name for name in names if name not in keys.values())
        if found.takes_rest:
            return Choice(found, keys | {name: name for name in unread if name not in keys}, (), ())
        absent = [field for field in found.fields if field not in keys]
        for name in unread[:_MANY] if not self.is_chosen else ():
            if near := difflib.get_close_matches(name[:60], absent, n=1, cutoff=_NEAR):
                raise MalformedError(f"unknown field {quoted(name)}; did you mean {near[0]!r}?")
        refused = () if self.is_chosen else tuple(name for name in unread if name in _MATTERS)
        return Choice(found, keys, unread, refused)

    def _keys(self, one: Format[Made], names: Collection[str]) -> dict[str, str]:
        """Field -> the row's name of it."""
        keys: dict[str, str] = {}
        others = {field: alias for alias, field in (one.aliases or {}).items()}
        for field in one.fields:
            for name in [self.columns[field]] if field in self.columns else [field, others.get(field)]:
                if name is not None and name in names:
                    keys.setdefault(field, name)
        return keys

    def _why_none(self, names: tuple[str, ...]) -> str:
        """What is wrong with rows that have these names."""
        some = names[:_MANY]
        for ours, theirs in self.columns.items():
            if theirs not in names:
                return f"no column {quoted(theirs)} (for {ours}); {did_you_mean(theirs, some)}"
        if not names:
            return "no field"
        if {"chosen", "rejected"} <= set(names) and not any("chosen" in each.fields for each in self.formats):
            return "has chosen and rejected, which train.objective dpo and its like read"
        there = frozenset(names)
        nearest = max(self.formats, key=lambda each: len(set(each.needs) & set(self._keys(each, there))))
        has = set(self._keys(nearest, there))
        missing = [field for field in nearest.needs if field not in has]
        others = [name for name in some if name not in nearest.fields]
        for name in others:
            if near := difflib.get_close_matches(name[:60], missing, n=1, cutoff=_NEAR):
                return f"unknown field {quoted(name)}; did you mean {near[0]!r}?"
        if not has:
            known = list(dict.fromkeys(field for each in self.formats for field in each.fields))
            return f"unknown field {quoted(others[0])}; known: {', '.join(known)}"
        return f"{missing[0]!r} is missing"


# --- records of a language model --------------------------------------------------------------------------------------


def _text(row: dict[str, Any], origin: str) -> Record:
    return Record(text=_filled(row["text"], "text"), origin=origin)


def _prompt_completion(row: dict[str, Any], origin: str) -> Record:
    return record_of_answer(row, "completion", origin)


def _messages(row: dict[str, Any], origin: str) -> Record:
    return _conversation(row["messages"], row, origin, name="messages")


def _sharegpt(row: dict[str, Any], origin: str) -> Record:
    return _conversation(row["conversations"], row, origin, name="conversations")


def _alpaca(row: dict[str, Any], origin: str) -> Record:
    answer = {"role": "assistant", "content": _filled(row["output"], "output")}
    return _conversation([*alpaca_prompt(row), answer], row, origin, name="the turns")


def _tokens(row: dict[str, Any], origin: str) -> Record:
    return Record(tokens=checked_tokens(row), origin=origin)


def alpaca_prompt(row: Row) -> list[dict[str, Any]]:
    """The messages before the output of a row with `instruction`, and maybe `input` and `history`.

    The input stands in the line after the instruction; a history is a list of pairs of what was said before.
    """
    asked = checked_text(row["instruction"], "instruction")
    if more := checked_text(row.get("input", ""), "input"):
        asked = f"{asked}\n{more}" if asked else more
    messages = []
    history = row.get("history") or []  # a table has "" where there is none
    if not isinstance(history, (list, tuple)):
        raise MalformedError(f"history is {json_type(history)}, not a list")
    for index, pair in enumerate(history):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise MalformedError(f"history[{index}] is not a pair, of what the user and the assistant said")
        messages += [{"role": role, "content": said} for role, said in zip(("user", "assistant"), pair, strict=True)]
    return [*messages, {"role": "user", "content": asked}]


def answered_alone(row: Row) -> Row:
    """`row` with what is asked in its `prompt` alone, where `completion` is the whole conversation after a text."""
    prompt, turns = row.get("prompt"), row["completion"]
    is_whole = isinstance(prompt, str) and isinstance(turns, (list, tuple)) and len(turns) > 1
    if not is_whole or not any(isinstance(each, Mapping) and _says(each, str(prompt)) for each in turns):
        return row
    return {**row, "prompt": list(turns[:-1]), "completion": list(turns[-1:])}


def record_of_answer(row: Row, name: str, origin: str) -> Record:
    """The record of a row's `prompt` with its answer `name`: both text, or one of them or both lists of messages.

    Of lists only the answer is trained, not the turns of the assistant in the prompt.

    Raises:
        MalformedError: a value is of another type, or empty.
    """
    prompt, answer = row.get("prompt", ""), row[name]
    if isinstance(answer, Mapping):
        answer = [answer]
    if not isinstance(answer, (list, tuple)) and not isinstance(prompt, (list, tuple)):
        if beside := next((key for key in ("tools", "system") if row.get(key) not in (None, "", "[]", [])), None):
            raise MalformedError(f"has {beside}, but {name} is no list of messages")
        prompt = checked_text(prompt, "prompt")  # may be empty: generation from nothing
        return Record(prompt=prompt, completion=_filled(answer, name), origin=origin)
    if not isinstance(prompt, (list, tuple)):
        text = checked_text(prompt, "prompt")
        prompt = [{"role": "user", "content": text}] if text else []
        if text and any(isinstance(each, Mapping) and _says(each, text) for each in answer):
            prompt = []  # the whole conversation stands in the answer
    if not isinstance(answer, (list, tuple)):
        answer = [{"role": "assistant", "content": _filled(answer, name)}]
    record = _conversation([*prompt, *answer], row, origin, name=f"prompt and {name}" if prompt else name)
    assert record.messages is not None
    if all(each["role"] != "assistant" for each in record.messages[-len(answer) :]):
        raise MalformedError(f"{name} has no assistant turn")
    num = len(record.messages) - len(answer)
    return Record(messages=untrained(record.messages[:num]) + record.messages[num:], tools=record.tools, origin=origin)


def _says(message: Row, text: str) -> bool:
    return message.get("role", message.get("from")) in ("user", "human") and text == message.get(
        "content", message.get("value")
    )


def _conversation(messages: Any, row: Row, origin: str, *, name: str) -> Record:
    """With the `system` and `tools` of the row."""
    found = checked_messages(messages, name)
    if system := checked_text(row.get("system", ""), "system"):
        own = found[0]["content"] if found[0]["role"] == "system" else None
        if own not in (None, system):
            raise MalformedError(f"has a system and, in {name}, another one")
        found = found if own is not None else ({"role": "system", "content": system}, *found)
    tools = checked_tools(row["tools"]) if "tools" in row else None
    return Record(messages=found, tools=tools, origin=origin)


def _filled(value: object, name: str) -> str:
    text = checked_text(value, name)
    if not text.strip():
        raise MalformedError(f"empty {name}")
    return text


def checked_tokens(row: Row) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """(ids, whether each is trained) of a row of tokens, without padding.

    `labels` are those of transformers: the token's own id where it is trained, not the next one's, and -100 elsewhere.
    Where several of the masks are there a token is trained that all of them have; without any, all are.

    Raises:
        MalformedError: lists of different lengths, labels of other tokens, or gaps in the attention mask.
    """
    ids = row["input_ids"]
    if not isinstance(ids, (list, tuple)) or len(ids) < 2 or any(type(token) is not int for token in ids):
        raise MalformedError("input_ids is not a list of two token ids or more")
    masks = {name: row[name] for name in TOKEN_MASKS if name in row}
    for name, mask in masks.items():
        if not isinstance(mask, (list, tuple)) or len(mask) != len(ids):
            raise MalformedError(f"{name} is not a list of one number for each of {len(ids)} input_ids")
        if any(not isinstance(each, int) for each in mask) or (name != "labels" and set(mask) - {0, 1}):
            raise MalformedError(f"{name} holds what is no {'label' if name == 'labels' else '0 or 1'}")
    is_trained = [True] * len(ids)
    for name, mask in masks.items():
        untrained_label = -100 if name == "labels" else 0
        is_trained = [flag and each != untrained_label for flag, each in zip(is_trained, mask, strict=True)]
        if name == "labels":
            wrong = next((i for i, each in enumerate(mask) if each not in (-100, ids[i])), None)
            if wrong is not None:
                shifted = " (are they shifted?)" if wrong + 1 < len(ids) and mask[wrong] == ids[wrong + 1] else ""
                raise MalformedError(f"labels[{wrong}] is {mask[wrong]}, neither -100 nor the token there{shifted}")
    attended = masks.get("attention_mask", [1] * len(ids))
    if not any(attended):
        raise MalformedError("attention_mask has no token")
    start, end = attended.index(1), len(attended) - [*reversed(attended)].index(1)
    if not all(attended[start:end]):
        raise MalformedError("attention_mask has a gap: tokens in the middle would be left out")
    return tuple(ids[start:end]), tuple(is_trained[start:end])


TOKEN_MASKS = ("labels", "attention_mask", "completion_mask", "assistant_masks")
RECORDS: tuple[Format[Record], ...] = (
    Format("messages", ("messages",), _messages, ("system", "tools")),
    Format("sharegpt", ("conversations",), _sharegpt, ("system", "tools")),
    Format("alpaca", ("instruction", "output"), _alpaca, ("input", "system", "history")),
    Format("prompt_completion", ("prompt", "completion"), _prompt_completion, ("system", "tools")),
    # The LoRA paper's own files; entries of WebNLG and DART become such rows (`nlg.expanded`).
    Format("context_completion", ("context", "completion"), context_record, ("cate",)),
    Format("tokens", ("input_ids",), _tokens, TOKEN_MASKS),
    Format("text", ("text",), _text, is_weak=True),
)
