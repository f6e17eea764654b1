"""Preference data as adjacent sequences: pairs of answers, or labelled answers next to an answer to another prompt.
Owns: the fields of such records, and which other answer accompanies a single one. Does not own: tokenisation
(`reading.tokenization`), the losses (`run.objectives`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlora.reading.conversations import untrained
from meshlora.reading.formats import Format, alpaca_prompt, answered_alone, record_of_answer
from meshlora.reading.records import LeftOutError, MalformedError, Record, filled_text, is_number, json_type
from meshlora.reading.sources import Reading, Row, read_rows
from meshlora.reading.tokenization import tokenize
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_preferences(source: str | list[str], tokenizer: PreTrainedTokenizerBase, **options: Any) -> TokenizedDataset:
    """Sequences 2i and 2i + 1 are the chosen and the rejected answer of pair i.

    A row has `chosen` and `rejected`, each text or messages, and what they answer (`PREFERENCES`): a `prompt`, an
    `instruction`, a `question` or `conversations`; or nothing: then what both begin with is the prompt. options: those
    of `Reading.taken_from` and of `tokenize`; too_long drops both sequences.

    Raises:
        UserError: as `read_rows` and `tokenize`.
    """
    rows = read_rows(source, PREFERENCES, Reading.taken_from(options, tokenizer))
    return tokenize(rows, tokenizer, **options)


def read_margins(source: str | list[str], tokenizer: PreTrainedTokenizerBase, **options: Any) -> TokenizedDataset:
    """`read_preferences` of rows that may have a `margin`, a number: by how much the chosen answer is better.

    `targets` `[N, 1]` has that of both sequences of a pair, 0 where a row has none.
    """
    rows = read_rows(source, _WITH_MARGINS, Reading.taken_from(options, tokenizer))
    tokens = tokenize([pair for pair, _ in rows], tokenizer, **options)
    margins = np.array([margin for _, margin in rows], dtype=np.float32).repeat(2)
    return dataclasses.replace(tokens, targets=margins[tokens.sources].reshape(-1, 1))


def read_feedback(source: str | list[str], tokenizer: PreTrainedTokenizerBase, **options: Any) -> TokenizedDataset:
    """Sequence 2i is record i; 2i + 1 is its prompt with the completion of the nearest earlier record (cyclically)
    with another prompt. Column `desirable`, float32 `[N]`: 1 or -1.

    A row has `prompt`, `completion` and `label`, true or false; the first two are text, or lists of messages.
    `FEEDBACK` has the other shapes. options: those of `read_preferences`; too_long drops both.

    Raises:
        UserError: all records have the same prompt; as `read_rows` and `tokenize`.
    """
    rows = [row for of_one in read_rows(source, FEEDBACK, Reading.taken_from(options)) for row in of_one]
    if len({isinstance(row["completion"], list) for _, row in rows}) > 1:
        raise UserError(f"{rows[0][0]} and others", "messages in some records and text in others", "give them alike")
    others = _before_with_another_prompt([row.get("prompt") for _, row in rows])
    records = []
    for (origin, row), other in zip(rows, others, strict=True):
        own = record_of_answer(row, origin, name="completion")
        beside = {**row, "completion": rows[other][1]["completion"]}
        records.append((own, record_of_answer(beside, origin, name="completion")))
    tokens = tokenize(records, tokenizer, **options)  # without examples that are left out: see `sources`
    is_desirable = np.repeat([row["label"] for _, row in rows], 2)[tokens.sources]
    signs = np.where(is_desirable, 1, -1).astype(np.float32)
    return dataclasses.replace(tokens, columns={"desirable": np.repeat(signs, np.diff(tokens.offsets))})


def _before_with_another_prompt(prompts: list[Any]) -> list[int]:
    """For each prompt the index of the nearest earlier one that differs, cyclically."""
    number, found = len(prompts), [-1] * len(prompts)
    for place in range(1, 2 * number):  # two rounds, as the first prompts look back at the last
        one, before = place % number, (place - 1) % number
        found[one] = before if prompts[before] != prompts[one] else found[before]
    if -1 in found:
        rule = "the divergence from the base is estimated with answers to other prompts"
        raise UserError("records that all have one prompt", rule, "give records with another prompt")
    return found


def _pair(row: dict[str, Any], origin: str) -> tuple[Record, ...]:
    chosen, rejected = _answered(row, "chosen", origin), _answered(row, "rejected", origin)
    if chosen.kind != rejected.kind:
        raise MalformedError("one of chosen and rejected is text, the other a list of messages")
    if chosen == rejected:
        raise MalformedError("chosen and rejected are the same")
    return _with_shared_prompt(chosen, rejected)


def _answered(row: dict[str, Any], name: str, origin: str) -> Record:
    """The record of an answer, with what it answers as a prompt."""
    shared = {key: value for key, value in row.items() if key in _BESIDE}
    if "instruction" in row:
        prompt: Any = alpaca_prompt(row)
    elif "conversations" in row:
        prompt = row["conversations"]
        if not isinstance(prompt, list):
            raise MalformedError(f"conversations is {json_type(prompt)}, not a list")
    elif "question" in row:
        prompt = [{"role": "user", "content": row["question"]}]
    else:
        prompt = row.get("prompt", "")
        # A system message makes a conversation, which two texts alone are not.
        if "system" in row and isinstance(prompt, str) and isinstance(row[name], str):
            prompt = [{"role": "user", "content": prompt}]
    return record_of_answer({**shared, "prompt": prompt, name: row[name]}, origin, name=name)


def _with_shared_prompt(chosen: Record, rejected: Record) -> tuple[Record, Record]:
    """The same two, where what both conversations begin with is not trained, and texts without a prompt get one.

    A text is cut before the word in which the two differ first, as tokens do not cross the start of a word.
    """
    if chosen.messages is not None and rejected.messages is not None:
        number = _num_alike(chosen.messages, rejected.messages)
        prompt = untrained(chosen.messages[:number])
        return (
            dataclasses.replace(chosen, messages=prompt + chosen.messages[number:]),
            dataclasses.replace(rejected, messages=prompt + rejected.messages[number:]),
        )
    if chosen.prompt or rejected.prompt:
        return chosen, rejected
    one, other = chosen.completion or "", rejected.completion or ""
    number = _num_alike(one, other)
    cut = max(one.rfind(" ", 0, number), one.rfind("\n", 0, number))
    if cut <= 0 or not one[cut:].strip() or not other[cut:].strip():  # nothing would be left to train
        return chosen, rejected
    return (
        Record(prompt=one[:cut], completion=one[cut:], origin=chosen.origin),
        Record(prompt=other[:cut], completion=other[cut:], origin=rejected.origin),
    )


def _num_alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _ranked(names: tuple[str, str], strength: str, row: dict[str, Any]) -> tuple[Any, str, str]:
    """(prompt, better answer, worse answer) of a row that says by how much its second answer is better than its first.

    Raises:
        LeftOutError: neither is.
    """
    by = row[strength]
    if isinstance(by, bool) or not isinstance(by, (int, float)):
        raise MalformedError(f"{strength} is {json_type(by)}, not a number")
    if not by:
        raise LeftOutError(f"{strength} is 0, so neither answer is preferred")
    better, worse = names if by < 0 else names[::-1]
    asked = "context" if "context" in row else "prompt"
    prompt = row[asked]
    if not isinstance(prompt, (list, tuple)):
        prompt = [{"role": "user", "content": filled_text(prompt, asked)}]
    return prompt, filled_text(row[better], better), filled_text(row[worse], worse)


def _pair_of_ranked(names: tuple[str, str], strength: str, row: dict[str, Any], origin: str) -> tuple[Record, ...]:
    prompt, better, worse = _ranked(names, strength, row)
    return _pair({**row, "prompt": prompt, "chosen": better, "rejected": worse}, origin)


def _judged_of_ranked(names: tuple[str, str], strength: str, row: dict[str, Any], origin: str) -> list[Row]:
    """Both answers, each by itself."""
    prompt, better, worse = _ranked(names, strength, row)
    found = []
    for text, label in ((better, True), (worse, False)):
        own = {"prompt": prompt, "completion": [{"role": "assistant", "content": text}], "label": label}
        found.append((origin, own | {name: row[name] for name in _BESIDE if name in row}))
    return found


def _judged(row: dict[str, Any], origin: str) -> list[Row]:
    """(origin, prompt, completion and label) of a row, alone."""
    if "kto_tag" in row:  # LLaMA-Factory's name
        row["label"] = row.pop("kto_tag")
    if not isinstance(row["label"], bool):
        raise MalformedError(f"label is {json_type(row['label'])}, not true or false")
    if (turns := row.pop("messages", row.pop("conversations", None))) is not None:
        if not isinstance(turns, list) or len(turns) < 2:
            raise MalformedError("the conversation is no list of two messages or more")
        row |= {"prompt": turns[:-1], "completion": turns[-1:]}
    if "instruction" in row:
        row |= {"prompt": alpaca_prompt(row), "completion": [{"role": "assistant", "content": row.pop("output")}]}
        for key in ("instruction", "input", "history"):
            row.pop(key, None)
    record_of_answer(row, origin, name="completion")  # raises where it is none
    return [(origin, dict(answered_alone(row)))]  # else the answer to another prompt would bring that prompt with it


_BESIDE = ("system", "tools")
_ANSWERS = ("chosen", "rejected")
# HelpSteer3 and HelpSteer2's preferences: what is asked, two answers, how much better the second is, from -3 to 3.
_RANKED = (
    ("context", ("response1", "response2"), "overall_preference"),
    ("prompt", ("response_1", "response_2"), "preference_strength"),
)
PREFERENCES: tuple[Format[tuple[Record, ...]], ...] = (
    Format("preference", (*_ANSWERS, "prompt"), _pair, _BESIDE),
    Format("preference", (*_ANSWERS, "conversations"), _pair, _BESIDE),
    Format("preference", (*_ANSWERS, "instruction"), _pair, ("input", "history", *_BESIDE)),
    Format("preference", (*_ANSWERS, "question"), _pair, _BESIDE),
    Format("preference", _ANSWERS, _pair, _BESIDE, weakness=1),
    *(
        Format("preference", (asked, *names, strength), functools.partial(_pair_of_ranked, names, strength), _BESIDE)
        for asked, names, strength in _RANKED
    ),
)


def _with_margin(make: Callable[..., tuple[Record, ...]], row: dict[str, Any], origin: str) -> tuple[Any, float]:
    margin = row.pop("margin", 0.0)
    if not is_number(margin):
        raise MalformedError(f"margin is {json_type(margin)}, not a finite number")
    return make(row, origin), float(margin)


_WITH_MARGINS: list[Format[Any]] = []
for _known in PREFERENCES:
    _make: Any = functools.partial(_with_margin, _known.make)
    _WITH_MARGINS.append(Format(_known.name, _known.needs, _make, (*_known.may, "margin"), weakness=_known.weakness))


def _feedback(label: str) -> tuple[Format[list[Row]], ...]:
    return (
        Format("feedback", ("prompt", "completion", label), _judged, _BESIDE),
        Format("feedback", ("messages", label), _judged, _BESIDE),
        Format("feedback", ("conversations", label), _judged, _BESIDE),
        Format("feedback", ("instruction", "output", label), _judged, ("input", "history", *_BESIDE)),
    )


FEEDBACK = (
    *_feedback("label"),
    *_feedback("kto_tag"),
    *(
        Format("feedback", (asked, *names, strength), functools.partial(_judged_of_ranked, names, strength), _BESIDE)
        for asked, names, strength in _RANKED
    ),
)
