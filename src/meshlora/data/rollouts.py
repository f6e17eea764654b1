"""Rollouts of a policy: tokens with advantages or rewards, log-probabilities and weights.

Owns: the fields of such a record, their alignment with tokens, and which records are of one group. Does not own:
tokenisation of text (`data.tokenization`), advantages from rewards (`train.advantages`), losses (`train.objectives`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlora.common.errors import UserError
from meshlora.data.formats import RECORDS, Format, Formats
from meshlora.data.records import MalformedError, Problems, Record, json_type
from meshlora.data.sources import read_rows
from meshlora.data.tokenization import Sequence, TokenizedDataset, tokenize
from meshlora.data.too_long import Found, Taken

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Field names of a record (one number for all trained tokens, or a list) -> column, default (None: required).
_ADVANTAGE = {("advantage", "advantages"): ("advantage", None)}
_VALUES = {
    ("old_log_probs",): ("old_log_prob", math.nan),
    ("engine_log_probs",): ("engine_log_prob", math.nan),
    ("weight", "weights"): ("weight", 1.0),
}
_OF_TEXT = [each for each in RECORDS if each.name in ("messages", "prompt_completion", "text")]
_TEXTS = Formats(_OF_TEXT, "auto", None)
TEXT_FIELDS = tuple(dict.fromkeys(name for each in _OF_TEXT for name in each.fields))
_COMMON = (*TEXT_FIELDS, "input_ids", "is_trained", *(name for names in _VALUES for name in names))
FIELDS = (*_COMMON, *(name for names in _ADVANTAGE for name in names))
REWARDED_FIELDS = (*_COMMON, "reward", "group")
_LISTS = ("advantages", "old_log_probs", "engine_log_probs", "weights")
_Kept = tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]  # tokens, which are trained, columns
_LARGEST = float(np.finfo(np.float32).max)


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
    is_rewarded: bool = False,
    **options: Any,
) -> TokenizedDataset:
    """One sequence per row, with columns `advantage`, `old_log_prob`, `engine_log_prob` and `weight`, float32 `[N]`.

    A row has `input_ids` and `is_trained`, or the fields of a `Record` (`messages`; `prompt` and `completion`; `text`);
    and `advantage` (a number) or `advantages` (a list). `old_log_probs` (a list) are the trainer's, of the policy that
    acted; the default is on-policy. `engine_log_probs` are those of the engine that sampled; the default is no
    correction. `weight` or `weights` scale the loss of tokens; the default is 1.
    Lists have one number per trained token, or, with `input_ids`, one per token. options: of `tokenize`.
    is_rewarded: rows have `reward`, a number, in place of advantages, and may have `group`, a text or whole number;
        without it the records of one prompt are a group. `targets` are then float32 `[num_sequences, 2]`: the reward,
        and how many sequences before this one the first of its group is.

    Raises:
        UserError: malformed rows, the first five with file and line; groups that are all of one rollout; as
            `read_rows` and `tokenize`.
    """
    values = _VALUES if is_rewarded else _ADVANTAGE | _VALUES
    fields, asked = (REWARDED_FIELDS, "reward") if is_rewarded else (FIELDS, "advantage or advantages")
    what = f"{{input_ids, is_trained}} or {{messages}} or {{prompt, completion}}, with {asked}"

    def with_record(row: dict[str, Any], origin: str) -> tuple[str, dict[str, Any], Record | None]:
        return origin, row, _record(row, origin)

    known = [Format("rollouts", (), with_record, fields)]
    rows = read_rows(source, known, columns=columns, format=format, say=say)
    records = [record for _, _, record in rows if record is not None]
    options |= {"max_length": max_length, "too_long": too_long, "vocab_size": vocab_size, "say": say, "processor": None}
    tokenized = _of_records(records, tokenizer, options)
    mistakes, found = Problems(what), Found()
    kept: list[_Kept] = []
    rewards: list[tuple[float, Hashable]] = []
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
            own = _values(row, values, trained, is_cut=len(ids) == max_length and record is not None)
            graded = _graded(row, ids, trained) if is_rewarded else None
            if not trained[1:max_length].any():
                raise MalformedError(f"no trained token within max_length={max_length}")
        except MalformedError as reason:
            mistakes.add(origin, reason)
            continue
        rewards += [] if graded is None else [graded]
        kept.append((ids[:max_length], trained[:max_length], {name: c[:max_length] for name, c in own.items()}))
    mistakes.raise_if_any()
    taken = Taken(len(rows), max_length, too_long, num_given, len(rows) - len(kept), first)
    found.refuse(taken, len(kept))
    if say is not None and (words := taken.words(len(kept))):
        say(words)
    return _dataset(kept, taken, _targets(rewards) if is_rewarded else None)


def read_rewarded(source: str | list[str], tokenizer: PreTrainedTokenizerBase, **options: Any) -> TokenizedDataset:
    """`read_rollouts` of rows with rewards."""
    return read_rollouts(source, tokenizer, is_rewarded=True, **options)


def _dataset(kept: list[_Kept], taken: Taken, targets: np.ndarray | None) -> TokenizedDataset:
    offsets = np.cumsum([0, *(len(ids) for ids, _, _ in kept)], dtype=np.int64)
    columns = {name: np.concatenate([own[name] for _, _, own in kept]) for name in kept[0][2]}
    ids, trained = (np.concatenate(parts) for parts in list(zip(*kept, strict=True))[:2])
    return TokenizedDataset(ids, trained, offsets, columns, targets=targets, taken=taken)


class _Prompt(tuple[int, ...]):
    """The tokens of a prompt, as the group of its completions."""


def _graded(row: Mapping[str, Any], ids: np.ndarray, is_trained: np.ndarray) -> tuple[float, Hashable]:
    """(reward, group) of a row. Raises: MalformedError."""
    if "reward" not in row:
        raise MalformedError("has no reward")
    if not _is_number(row["reward"]):
        raise MalformedError("reward is not a finite number")
    if "group" not in row:
        return row["reward"], _Prompt(ids[: int(is_trained.argmax())].tolist())
    if isinstance(row["group"], bool) or not isinstance(row["group"], str | int):
        raise MalformedError(f"group is {json_type(row['group'])}, a text or a whole number is needed")
    return row["reward"], (type(row["group"]), row["group"])


def _targets(rewards: list[tuple[float, Hashable]]) -> np.ndarray:
    """(reward, sequences since the first of its group) of each sequence. Raises: UserError."""
    if len({isinstance(group, _Prompt) for _, group in rewards}) > 1:
        raise UserError(
            "some rollouts have a group and others not", "theirs would be the prompt", "give all one, or none"
        )
    firsts: dict[Hashable, int] = {}
    since = [number - firsts.setdefault(group, number) for number, (_, group) in enumerate(rewards)]
    if not any(since):
        rule = "the rewards of a group are compared with each other, and each has one rollout"
        raise UserError(f"{len(rewards)} rollouts of as many groups", rule, "give several of a prompt one group")
    assert max(since) < 2**24, "float32 counts so far"
    return np.array([[reward for reward, _ in rewards], since], dtype=np.float32).T


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


def _values(
    row: Mapping[str, Any], values: Mapping[Any, Any], is_trained: np.ndarray, *, is_cut: bool
) -> dict[str, np.ndarray]:
    """Column -> float32 `[S]`, 0 at untrained tokens. is_cut: the text may have been truncated."""
    columns = {}
    for names, (column, default) in values.items():
        given = [name for name in names if name in row]
        if len(given) > 1:
            raise MalformedError(f"has {given[0]} and {given[1]}: one of the two")
        if not given and default is None:
            raise MalformedError(f"has neither {' nor '.join(names)}")
        value = row[given[0]] if given else default
        if given and (given[0] in _LISTS) != isinstance(value, list):
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
