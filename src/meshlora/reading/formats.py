"""The formats in which people have their rows: how each is known by its fields, and what is read of it.

Owns: names of formats, their fields and aliases, which columns are not read, and what a row becomes. Does not own:
messages (`conversations.py`), reading rows (`sources.py`), what objectives add (`preferences.py`, `rollouts.py`).

A format is known by the fields that it needs: a row that has them is of that format, whatever else it has. What else it
has is not read, and said; unless it could have an effect on what is trained, like a weight: then it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from meshlora.reading.conversations import checked_messages, checked_tools, untrained
from meshlora.reading.nlg import context_record
from meshlora.reading.records import MalformedError, Record, checked_text, filled_text, json_type, quoted
from meshlora_ground.errors import UserError, did_you_mean, nearest

Made = TypeVar("Made")
Row = Mapping[str, Any]

# Columns that say something about the training, wherever they are not read.
_MATTERS = frozenset(
    {
        *("weight", "weights", "train", "training", "loss_mask", "is_trained", "labels", "completion_mask"),
        *("assistant_masks", "advantage", "advantages", "old_log_probs", "engine_log_probs", "routed_experts"),
        *("context", "system", "history", "tools", "functions"),
        *("image", "images", "video", "videos", "audio", "audios"),
    }
)
_MANY = 100  # columns, beyond which misspelt ones are not looked for


@dataclass(frozen=True)
class Format(Generic[Made]):
    """One format.

    Attributes:
        needs: fields that a row must have. may: fields that are read where a row has them.
        make: (the row's fields, origin) -> what is read; raises MalformedError.
        weakness: a format that fits and is less weak goes before: a `text` often stands beside what it was made of.
        aliases: other name -> field. takes_rest: all other fields are read, too, under their own names.
    """

    name: str
    needs: tuple[str, ...]
    make: Callable[[dict[str, Any], str], Made]
    may: tuple[str, ...] = ()
    weakness: int = 0
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
        values = {}
        for field, name in self.keys.items():
            value = row.get(name)
            if value is not None or field in self.format.needs:  # a table has None where there is none
                values[field] = value
        return self.format.make(values, origin)


class Formats(Generic[Made]):
    """The formats of one kind of data, with what a user says of them.

    Args:
        given: `data.format`: a name, or "auto". columns: our field -> theirs.

    Raises:
        UserError: a format or a field that these data do not have, or fields of several formats.
    """

    def __init__(self, known: Sequence[Format[Made]], given: str, columns: Mapping[str, str] | None) -> None:
        self.columns, self.is_chosen = dict(columns or {}), given != "auto" or bool(columns)
        formats = [each for each in known if given in ("auto", each.name)]
        if not formats:
            names = dict.fromkeys(each.name for each in known)  # several formats may have one name
            rule = "train.objective reads other records"
            raise UserError(f"data.format={given}", rule, f"one of auto, {', '.join(names)}")
        every = _fields_of(formats)
        for name in self.columns:
            if name not in every:
                rule = "is not a field of a record"
                raise UserError(f"columns: {quoted(name)}", rule, did_you_mean(name[:60], every))
        self.formats = [each for each in formats if set(self.columns) <= set(each.fields)]
        if not self.formats:
            raise UserError(
                f"columns for {', '.join(self.columns)}",
                "name more than one kind of record",
                "choose the fields of one: " + "; ".join(f"{each.name}: {', '.join(each.fields)}" for each in formats),
            )
        # Most rows have the same names. Of the object, not the class: a cache of the class would keep it for ever.
        self.choice = functools.lru_cache(64)(self._choice)

    @property
    def fields(self) -> list[str]:
        """All that `data.columns` can name."""
        return _fields_of(self.formats)

    def _choice(self, names: tuple[str, ...]) -> Choice[Made]:
        found = self._fitting(names)
        by_field = self._keys(found, frozenset(names))
        keys = dict(sorted(by_field.items(), key=lambda item: names.index(item[1])))
        unread = tuple(name for name in names if name not in keys.values())
        if found.takes_rest:
            return Choice(found, keys | {name: name for name in unread if name not in keys}, (), ())
        if self.is_chosen:  # the user has said what to read
            return Choice(found, keys, unread, ())
        _check_spelling(unread[:_MANY], [field for field in found.fields if field not in keys])
        return Choice(found, keys, unread, tuple(name for name in unread if name in _MATTERS))

    def _fitting(self, names: tuple[str, ...]) -> Format[Made]:
        """The one format that rows with these names have. Raises: MalformedError."""
        there = frozenset(names)
        fitting = [each for each in self.formats if self._keys(each, there).keys() >= {*each.needs}]
        least = min((each.weakness for each in fitting), default=0)
        fitting = [each for each in fitting if each.weakness == least]
        if not fitting:
            raise MalformedError(self._why_none(names))
        if len(fitting) > 1:
            kinds = [f"{each.name} ({', '.join(each.needs)})" for each in fitting]
            raise MalformedError(
                f"has the fields of different kinds of record, {' and '.join(kinds)}; say which in data.format, "
                "or which columns in data.columns"
            )
        return fitting[0]

    def _keys(self, one: Format[Made], names: Collection[str]) -> dict[str, str]:
        """Field -> the row's name of it: what the user says, else its own before its alias."""
        keys: dict[str, str] = {}
        others = {field: alias for alias, field in (one.aliases or {}).items()}
        for field in one.fields:
            name = self.columns.get(field, field)
            if name not in names and field not in self.columns:
                name = others.get(field, field)
            if name in names:
                keys[field] = name
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
        nearest = max(self.formats, key=lambda each: len(self._keys(each, there).keys() & {*each.needs}))
        has = self._keys(nearest, there)
        missing = [field for field in nearest.needs if field not in has]
        others = [name for name in some if name not in nearest.fields]
        _check_spelling(others, missing)
        if not has:
            known = dict.fromkeys(each.name for each in self.formats)
            return f"unknown field {quoted(others[0])}; known are rows of {', '.join(known)} (docs/data.md)"
        return f"{missing[0]!r} is missing"


def _fields_of(formats: Sequence[Format[Any]]) -> list[str]:
    found: dict[str, None] = {}
    for each in formats:
        found |= dict.fromkeys(each.fields)
    return list(found)


def _check_spelling(names: Sequence[str], fields: Sequence[str]) -> None:
    """Raises: MalformedError: a name is almost one of `fields`, which are not there."""
    for name in names:
        if near := nearest(name[:60], fields):
            raise MalformedError(f"unknown field {quoted(name)}; did you mean {near!r}?")


# --- records of a language model --------------------------------------------------------------------------------------


def _text(row: dict[str, Any], origin: str) -> Record:
    return Record(text=filled_text(row["text"], "text"), origin=origin)


def _turns(name: str, row: dict[str, Any], origin: str) -> Record:
    return _conversation(row[name], row, origin, name=name)


def _alpaca(row: dict[str, Any], origin: str) -> Record:
    answer = {"role": "assistant", "content": filled_text(row["output"], "output")}
    return _conversation([*alpaca_prompt(row), answer], row, origin, name="the turns")


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
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return [*messages, {"role": "user", "content": asked}]


def _pair(asked: str, answer: str, row: dict[str, Any], origin: str) -> Record:
    """The conversation of what is asked and answered, under these names; a context is the line after what is asked."""
    return record_of_answer({**row, "prompt": asked_turns(row, asked)}, origin, name=answer)


def asked_turns(row: Row, asked: str) -> Any:
    """The turns before the answer: a list of messages as it is, or what a text asks, with its `context`, if any."""
    given = row[asked]
    if isinstance(given, (list, tuple)):
        return given
    text = filled_text(given, asked)
    if asked == "instruction" and (context := checked_text(row.get("context", ""), "context")):
        text = f"{text}\n{context}"  # as Alpaca's input
    return [{"role": "user", "content": text}]


def _calls(row: dict[str, Any], origin: str) -> Record:
    """The conversation of a question that calls of tools answer, these a list, or the JSON of one."""
    calls = row["answers"]
    if isinstance(calls, str):
        answer: dict[str, Any] = {"role": "function_call", "content": calls}
    else:
        answer = {"role": "assistant", "content": None, "tool_calls": calls}
    asked = {"role": "user", "content": filled_text(row["query"], "query")}
    record = _conversation([asked, answer], row, origin, name="query and answers")
    if record.tools is None:
        raise MalformedError("tools is empty")
    return record


def answered_alone(row: Row) -> Row:
    """`row` with what is asked in its `prompt` alone, where `completion` is the whole conversation after a text."""
    prompt, turns = row.get("prompt"), row["completion"]
    if isinstance(prompt, str) and isinstance(turns, (list, tuple)) and len(turns) > 1 and _is_said(prompt, turns):
        return {**row, "prompt": list(turns[:-1]), "completion": list(turns[-1:])}
    return row


def record_of_answer(row: Row, origin: str, *, name: str) -> Record:
    """The record of a row's `prompt` with its answer `name`: both text, or one of them or both lists of messages.

    Of lists only the answer is trained, not the turns of the assistant in the prompt.

    Raises:
        MalformedError: a value is of another type, or empty.
    """
    prompt, answer = row.get("prompt", ""), row[name]
    if isinstance(answer, Mapping):
        answer = [answer]
    if not isinstance(answer, (list, tuple)) and not isinstance(prompt, (list, tuple)):
        for beside in ("tools", "system"):
            if row.get(beside) not in (None, "", "[]", []):  # tables have an empty one where there is none
                raise MalformedError(f"has {beside}, but {name} is no list of messages")
        prompt = checked_text(prompt, "prompt")  # may be empty: generation from nothing
        return Record(prompt=prompt, completion=filled_text(answer, name), origin=origin)
    if not isinstance(prompt, (list, tuple)):
        text, prompt = checked_text(prompt, "prompt"), []
        if text and not _is_said(text, answer):  # else the whole conversation stands in the answer
            prompt = [{"role": "user", "content": text}]
    if not isinstance(answer, (list, tuple)):
        answer = [{"role": "assistant", "content": filled_text(answer, name)}]
    both = f"prompt and {name}" if prompt else name
    record = _conversation([*prompt, *answer], row, origin, name=both)
    assert record.messages is not None
    num = len(record.messages) - len(answer)  # a message of the system may have come before the prompt
    before, after = record.messages[:num], record.messages[num:]
    if all(each["role"] != "assistant" for each in after):
        raise MalformedError(f"{name} has no assistant turn")
    return Record(messages=untrained(before) + after, tools=record.tools, origin=origin)


def _is_said(text: str, turns: Sequence[Any]) -> bool:
    """Whether one of the turns, of OpenAI's form or ShareGPT's, is the user's and says the text."""
    for turn in turns:
        is_users = isinstance(turn, Mapping) and turn.get("role", turn.get("from")) in ("user", "human")
        if is_users and text == turn.get("content", turn.get("value")):
            return True
    return False


def _conversation(messages: Any, row: Row, origin: str, *, name: str) -> Record:
    """With the `system` and `tools` of the row."""
    found = checked_messages(messages, name)
    if system := checked_text(row.get("system", ""), "system"):
        if found[0]["role"] != "system":
            found = ({"role": "system", "content": system}, *found)
        elif found[0]["content"] != system:
            raise MalformedError(f"has a system and, in {name}, another one")
    tools = checked_tools(row["tools"]) if "tools" in row else None
    return Record(messages=found, tools=tools, origin=origin)


def checked_tokens(row: Row) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """(ids, whether each is trained) of a row of tokens, without padding.

    `labels` are those of transformers: the token's own id where it is trained, not the next one's, and -100 elsewhere.
    Where several of the masks are there a token is trained that all of them have; without any, all are.

    Raises:
        MalformedError: lists of different lengths, labels of other tokens, or gaps in the attention mask.
    """
    ids = row["input_ids"]
    if not isinstance(ids, (list, tuple)) or len(ids) < 2 or {*map(type, ids)} != {int}:
        raise MalformedError("input_ids is not a list of two token ids or more")
    masks = {name: _checked_mask(row[name], name, len(ids)) for name in TOKEN_MASKS if name in row}
    is_trained = [True] * len(ids)
    for name, mask in masks.items():
        if name == "labels":
            _check_labels(mask, ids)
        untrained_label = -100 if name == "labels" else 0
        is_trained = [flag and each != untrained_label for flag, each in zip(is_trained, mask, strict=True)]
    attended = masks.get("attention_mask", [1] * len(ids))
    if not any(attended):
        raise MalformedError("attention_mask has no token")
    start, end = attended.index(1), len(attended) - attended[::-1].index(1)  # padding on either side is left out
    if not all(attended[start:end]):
        raise MalformedError("attention_mask has a gap: tokens in the middle would be left out")
    return tuple(ids[start:end]), tuple(is_trained[start:end])


def _checked_mask(mask: Any, name: str, length: int) -> Sequence[int]:
    if not isinstance(mask, (list, tuple)) or len(mask) != length:
        raise MalformedError(f"{name} is not a list of one number for each of {length} input_ids")
    are_numbers, are_labels = {*map(type, mask)} <= {int, bool}, name == "labels"
    if not are_numbers or (not are_labels and {*mask} - {0, 1}):
        raise MalformedError(f"{name} holds what is no {'label' if are_labels else '0 or 1'}")
    return mask


def _check_labels(labels: Sequence[int], ids: Sequence[int]) -> None:
    for place, label in enumerate(labels):
        if label not in (-100, ids[place]):
            shifted = " (are they shifted?)" if label in ids[place + 1 : place + 2] else ""
            raise MalformedError(f"labels[{place}] is {label}, neither -100 nor the token there{shifted}")


# What is asked, and what answers it, as sets have them: UltraFeedback's kin (`prompt`, `response`), Dolly
# (`instruction`, `response`), GSM8K, OpenOrca, MetaMathQA, Aya, NuminaMath. Other fields go before, as they say more.
PAIRS = (
    *(("user", "assistant"), ("question", "answer"), ("question", "response"), ("query", "response")),
    *(("prompt", "response"), ("instruction", "response"), ("inputs", "targets"), ("problem", "solution")),
)


def beside_pair(asked: str) -> tuple[str, ...]:
    """The optional fields of a pair."""
    return ("context", *_BESIDE) if asked == "instruction" else _BESIDE


TOKEN_MASKS = ("labels", "attention_mask", "completion_mask", "assistant_masks")
_BESIDE = ("system", "tools")
RECORDS: tuple[Format[Record], ...] = (
    Format("messages", ("messages",), functools.partial(_turns, "messages"), _BESIDE),
    Format("sharegpt", ("conversations",), functools.partial(_turns, "conversations"), _BESIDE),
    Format("alpaca", ("instruction", "output"), _alpaca, ("input", "system", "history")),
    Format(
        "prompt_completion", ("prompt", "completion"), functools.partial(record_of_answer, name="completion"), _BESIDE
    ),
    # The LoRA paper's own files; entries of WebNLG and DART become such rows (`nlg.expanded`).
    Format("context_completion", ("context", "completion"), context_record, ("cate",)),
    Format(
        "tokens", ("input_ids",), lambda row, origin: Record(tokens=checked_tokens(row), origin=origin), TOKEN_MASKS
    ),
    Format("xlam", ("query", "answers", "tools"), _calls, ("system",)),
    *(
        Format(
            "user_assistant",
            (asked, answer),
            functools.partial(_pair, asked, answer),
            beside_pair(asked),
            weakness=1,
            aliases={"system_prompt": "system"},
        )
        for asked, answer in PAIRS
    ),
    Format("text", ("text",), _text, weakness=2),
)
