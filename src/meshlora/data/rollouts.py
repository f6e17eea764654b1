"""Rollouts of a policy: tokens with advantages, old log-probabilities and weights.

Owns: the fields of such a record, and their alignment with tokens. Does not own: tokenisation of text
(`data.tokenization`), the losses (`train.objectives`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlora.data.formats import RECORDS, Format, Formats
from meshlora.data.records import MalformedError, Problems, Record, json_type
from meshlora.data.sources import read_rows
from meshlora.data.tokenization import Sequence, TokenizedDataset, tokenize
from meshlora.data.too_long import Found, Taken

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Field names of a record (one number for all trained tokens, or a list) -> column, default (None: required).
_VALUES = {
    ("advantage", "advantages"): ("advantage", None),
    ("old_log_probs",): ("old_log_prob", math.nan),
    ("weight", "weights"): ("weight", 1.0),
}
_OF_TEXT = [each for each in RECORDS if each.name in ("messages", "prompt_completion", "text")]
_TEXTS = Formats(_OF_TEXT, "auto", None)
TEXT_FIELDS = tuple(dict.fromkeys(name for each in _OF_TEXT for name in each.fields))
FIELDS = (*TEXT_FIELDS, "input_ids", "is_trained", *(name for names in _VALUES for name in names))
_LARGEST = float(np.finfo(np.float32).max)
COLUMNS = tuple(column for column, _ in _VALUES.values())


def read_rollouts(
    source: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    vocab_size: int,
    too_long: str = "truncate",
    columns: Mapping[str, str] | None = None,
    format: str = "auto",
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> TokenizedDataset:
    """One sequence per row, with columns `advantage`, `old_log_prob` and `weight`, float32 `[N]`.

    A row has `input_ids` and `is_trained`, or the fields of a `Record` (`messages`; `prompt` and `completion`; `text`);
    and `advantage` (a number) or `advantages` (a list). `old_log_probs` (a list) are those of the behaviour policy;
    the default is on-policy. `weight` or `weights` scale the loss of tokens; the default is 1.
    Lists have one number per trained token, or, with `input_ids`, one per token. options: of `tokenize`.

    Raises:
        UserError: malformed rows, the first five with file and line; as `read_rows` and `tokenize`.
    """
    what = "{input_ids, is_trained} or {messages} or {prompt, completion}, with advantage or advantages"

    def with_record(row: dict[str, Any], origin: str) -> tuple[str, dict[str, Any], Record | None]:
        return origin, row, _record(row, origin)

    known = [Format("rollouts", (), with_record, FIELDS)]
    rows = read_rows(source, known, columns=columns, format=format, say=say)
    records = [record for _, _, record in rows if record is not None]
    options |= {"max_length": max_length, "too_long": too_long, "vocab_size": vocab_size, "say": say, "processor": None}
    tokenized = _of_records(records, tokenizer, options)
    mistakes, found = Problems(what), Found()
    kept: list[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]] = []
    number, num_given, first = -1, 0, ""
    for origin, row, record in rows:
        try:
            if record is None:
                ids, trained = _tokens(row, vocab_size)
                if len(ids) > max_length:
                    num_given, first = num_given + 1, first or origin
                    found.too_long.append(f"{origin} ({len(ids)} tokens)")
                    if too_long == "drop":
                        continue
            else:
                number += 1
                if number not in tokenized:
                    continue
                ids, trained = tokenized[number].input_ids, tokenized[number].is_trained
            own = _values(row, trained, is_cut=len(ids) == max_length and record is not None)
            if not trained[1:max_length].any():
                raise MalformedError(f"no trained token within max_length={max_length}")
        except MalformedError as reason:
            mistakes.add(origin, reason)
            continue
        kept.append((ids[:max_length], trained[:max_length], {name: c[:max_length] for name, c in own.items()}))
    mistakes.raise_if_any()
    taken = Taken(len(rows), max_length, too_long, num_given, len(rows) - len(kept), first)
    found.refuse(taken, len(kept))
    if say is not None and (words := taken.words(len(kept))):
        say(words)
    offsets = np.cumsum([0, *(len(ids) for ids, _, _ in kept)], dtype=np.int64)
    columns_of_all = {name: np.concatenate([own[name] for _, _, own in kept]) for name in COLUMNS}
    ids_of_all, trained_of_all = (np.concatenate(parts) for parts in list(zip(*kept, strict=True))[:2])
    return TokenizedDataset(ids_of_all, trained_of_all, offsets, columns_of_all, taken=taken)


def _of_records(records: list[Record], tokenizer: Any, options: dict[str, Any]) -> dict[int, Sequence]:
    """Index of a record -> its tokens; without those that are left out."""
    if not records:
        return {}
    tokens = tokenize(records, tokenizer, **options)
    assert tokens.sources is not None
    return {int(source): sequence for source, sequence in zip(tokens.sources, tokens, strict=True)}


def _record(row: Mapping[str, Any], origin: str) -> Record | None:
    """The text record of a row; None if it holds tokens instead."""
    text = {name: value for name, value in row.items() if name in TEXT_FIELDS}
    if "input_ids" not in row:
        return _TEXTS.choice(tuple(text)).make(text, origin)
    if text:
        raise MalformedError(f"has input_ids and {', '.join(sorted(text))}: one of the two")
    return None


def _tokens(row: Mapping[str, Any], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    ids, trained = row["input_ids"], row.get("is_trained")
    if not isinstance(ids, list) or len(ids) < 2 or any(type(i) is not int for i in ids):
        raise MalformedError("input_ids is not a list of two token ids or more")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise MalformedError(f"input_ids has a token outside the vocabulary of {vocab_size}")
    if not isinstance(trained, list) or len(trained) != len(ids) or any(t not in (0, 1) for t in trained):
        raise MalformedError("is_trained is not a list of a 0 or 1 for each of input_ids")
    return np.array(ids, dtype=np.int32), np.array(trained, dtype=bool)


def _values(row: Mapping[str, Any], is_trained: np.ndarray, *, is_cut: bool) -> dict[str, np.ndarray]:
    """Column -> float32 `[S]`, 0 at untrained tokens. is_cut: the text may have been truncated."""
    columns = {}
    for names, (column, default) in _VALUES.items():
        given = [name for name in names if name in row]
        if len(given) > 1:
            raise MalformedError(f"has {given[0]} and {given[1]}: one of the two")
        if not given and default is None:
            raise MalformedError(f"has neither {' nor '.join(names)}")
        value = row[given[0]] if given else default
        if given and (given[0] in ("advantages", "old_log_probs", "weights")) != isinstance(value, list):
            raise MalformedError(f"{given[0]} is {json_type(value)}")
        found = np.zeros(len(is_trained), dtype=np.float32)
        if isinstance(value, list):
            number = int(is_trained.sum())
            if "input_ids" in row and len(value) == len(is_trained):
                value = [v for v, t in zip(value, is_trained.tolist(), strict=True) if t]
            elif is_cut and len(value) > number:
                value = value[:number]
            if len(value) != number:
                raise MalformedError(f"{given[0]} has {len(value)} numbers for {number} trained tokens")
        if given and any(not _is_number(v) for v in (value if isinstance(value, list) else [value])):
            raise MalformedError(f"{given[0]} holds what is not a finite number")
        found[is_trained] = value
        columns[column] = found
    return columns


def _is_number(value: Any) -> bool:
    """Whether `value` is finite in float32. NaN fails any comparison; `float` of a huge integer would overflow."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
