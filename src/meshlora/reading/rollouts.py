"""Rollouts of a policy: tokens with advantages or rewards, log-probabilities and weights.

Owns: the fields of such a record, their alignment with tokens, and which records are of one group. Does not own:
tokenisation of text (`reading.tokenization`), advantages from rewards (`run.advantages`), losses (`run.objectives`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlora.reading.formats import RECORDS, Format, Formats
from meshlora.reading.records import MalformedError, Problems, Record, is_number, json_type
from meshlora.reading.sources import Reading, read_rows
from meshlora.reading.tokenization import tokenize
from meshlora.reading.too_long import Found
from meshlora_ground.dataset import Sequence, Taken, TokenizedDataset
from meshlora_ground.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Field names of a record (one number for all trained tokens, or a list) -> column, default (None: required).
_ADVANTAGE = {("advantage", "advantages"): ("advantage", None)}
_ENGINE = ("engine_log_probs",)
_VALUES = {
    ("old_log_probs",): ("old_log_prob", math.nan),
    _ENGINE: ("engine_log_prob", math.nan),
    ("weight", "weights"): ("weight", 1.0),
}
_OF_TEXT = [each for each in RECORDS if each.name in ("messages", "prompt_completion", "text")]
_TEXTS = Formats(_OF_TEXT, "auto", None)
_TEXT_FIELDS = tuple(dict.fromkeys(name for each in _OF_TEXT for name in each.fields))
_ROUTED, TRUNCATED = "routed_experts", "truncated"
_COMMON = (*_TEXT_FIELDS, "input_ids", "is_trained", _ROUTED, TRUNCATED, *itertools.chain(*_VALUES))
FIELDS = (*_COMMON, *itertools.chain(*_ADVANTAGE))
REWARDED_FIELDS = (*_COMMON, "reward", "group")
_LISTS = ("advantages", "old_log_probs", "engine_log_probs", "weights")
_LOG_PROBS, _ROUNDING = ("old_log_probs", "engine_log_probs"), 1e-3
_LEAST_LOG_PROB = -1e4  # far below any of a softmax in float64; engines write -9999 for what they rule out


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
    is_taught: bool = False,
    masks_truncated: bool = False,
    **options: Any,
) -> TokenizedDataset:
    """One sequence per row, with columns `advantage`, `old_log_prob`, `engine_log_prob` and `weight`, float32 `[N]`.

    A row has `input_ids` and `is_trained`, or the fields of a `Record` (`messages`; `prompt` and `completion`; `text`);
    and `advantage` (a number) or `advantages` (a list). `old_log_probs` (a list) are the trainer's, of the policy that
    acted; the default is on-policy. `engine_log_probs` are those of the engine that sampled; the default is no
    correction. `weight` or `weights` scale the loss of tokens; the default is 1.
    Lists have one number per trained token, or, with `input_ids`, one per token. options: of `tokenize`.
    `routed_experts`, with `input_ids`, `[tokens][layers][k]`: the experts that the engine sent each token to, in each
    layer or in each that has experts; of the last token, which predicts nothing, they may be missing.
    is_rewarded: rows have `reward`, a number, in place of advantages, and may have `group`, a text or whole number;
        without it the records of one prompt are a group. `targets` are then float32 `[num_sequences, 2]`: the reward,
        and how many sequences before this one the first of its group is.
    is_taught: rows have neither, as a teacher says what they are worth; `engine_log_prob` is the only column.
    masks_truncated: there is a column `truncated`, too: 1 at trained tokens of a rollout whose record says so.

    Raises: UserError: malformed rows, the first five with file and line; groups that are all of one rollout; none says
    whether it was truncated; as `read_rows` and `tokenize`.
    """
    fields, what = _known(is_rewarded, is_taught)
    known = [Format("rollouts", (), lambda row, origin: (origin, row, _record(row, origin)), fields)]
    rows = read_rows(source, known, Reading(columns, format, say))
    values = _asked((row for _, row, _ in rows), is_rewarded, masks_truncated, is_taught=is_taught)
    records = [record for _, _, record in rows if record is not None]
    # Without a processor images are refused.
    options |= {"max_length": max_length, "too_long": too_long, "vocab_size": vocab_size, "say": say, "processor": None}
    tokenized = dict[int, Sequence]()  # by the index of the record; without those that are left out
    if records:
        tokens = tokenize(records, tokenizer, **options)
        assert tokens.sources is not None
        tokenized = dict(zip(tokens.sources.tolist(), tokens, strict=True))
    mistakes, found, kept = Problems(what), Found(), list[_Rollout]()
    number, num_given, first = -1, 0, ""
    for origin, row, record in rows:
        try:
            if record is None:
                ids, trained = tokens_of(row, vocab_size)
                if len(ids) > max_length:  # of records `tokenize` counts them
                    num_given, first = num_given + 1, first or origin
                    found.too_long.append(f"{origin} ({len(ids)} tokens)")
                    if too_long == "drop":
                        continue
            else:
                number += 1
                if number not in tokenized:  # too long, and dropped
                    continue
                ids, trained = tokenized[number].input_ids, tokenized[number].is_trained
            own = _values(row, values, trained, is_cut=len(ids) == max_length and record is not None)
            graded = _graded(row, ids, trained) if is_rewarded else None
            experts = None if is_taught else _routed(row, len(ids))
            if not trained[1:max_length].any():
                raise MalformedError(f"no trained token within max_length={max_length}")
        except MalformedError as reason:
            mistakes.add(origin, reason)
            continue
        kept.append(_Rollout(ids, trained, own, experts, graded).cut(max_length))
    mistakes.raise_if_any()
    taken = Taken(len(rows), max_length, too_long, num_given, len(rows) - len(kept), first)
    found.refuse(taken, len(kept))
    data = _dataset(kept, taken)
    for words in (taken.words(len(kept)), _idle(data)):
        if say is not None and words:
            say(words)
    return data


def _known(is_rewarded: bool, is_taught: bool) -> tuple[tuple[str, ...], str]:
    """(the fields of a row, in words what each must have)."""
    what = "{input_ids, is_trained} or {messages} or {prompt, completion}"
    if is_taught:
        return _COMMON, what
    if is_rewarded:
        return REWARDED_FIELDS, f"{what}, with reward"
    return FIELDS, f"{what}, with advantage or advantages"


def _asked(
    rows: Iterable[Mapping[str, Any]], is_rewarded: bool, masks_truncated: bool, *, is_taught: bool
) -> dict[Any, Any]:
    """The values of rollouts, as `_VALUES`. Raises: UserError: no row says whether it was truncated."""
    if is_taught:
        return {_ENGINE: _VALUES[_ENGINE]}
    values: dict[Any, Any] = {**_VALUES} if is_rewarded else {**_ADVANTAGE, **_VALUES}
    if not masks_truncated:
        return values
    if not any(TRUNCATED in row for row in rows):
        rule = f"no record has a field {TRUNCATED}, so which rollouts were cut off is not known"
        raise UserError("train.objective.mask_truncated", rule, f"write {TRUNCATED}: true or false, or leave it out")
    return values | {(TRUNCATED,): (TRUNCATED, 0.0)}


def _idle(data: TokenizedDataset) -> str:
    """What makes every gradient of `data` 0; empty: nothing does."""
    if "weight" not in data.columns:  # a teacher says something of every token
        return ""
    if not data.columns["weight"].any():
        return "note: the weights of all rollouts are 0: nothing is learnt from them"
    if data.targets is None:
        if not data.columns["advantage"].any():
            return "note: all advantages are 0: nothing is learnt from them"
        return ""
    rewards, since = data.targets.T
    of_first = rewards[np.arange(len(rewards)) - since.astype(np.int64)]
    if (rewards == of_first).all():
        return "note: in each group all rewards are equal: nothing is learnt from them"
    return ""


@dataclass(frozen=True)
class _Rollout:
    """A row that was read. columns: name -> `[S]`. routed: as in `TokenizedDataset`. graded: (reward, group)."""

    ids: np.ndarray
    is_trained: np.ndarray
    columns: Mapping[str, np.ndarray]
    routed: np.ndarray | None
    graded: tuple[float, Hashable] | None

    def cut(self, length: int) -> _Rollout:
        """Its first `length` tokens."""
        columns = {name: column[:length] for name, column in self.columns.items()}
        routed = None if self.routed is None else self.routed[:length]
        return replace(self, ids=self.ids[:length], is_trained=self.is_trained[:length], columns=columns, routed=routed)


def _dataset(kept: list[_Rollout], taken: Taken) -> TokenizedDataset:
    graded = [one.graded for one in kept if one.graded is not None]
    ids = [one.ids for one in kept]
    return TokenizedDataset(
        np.concatenate(ids),
        np.concatenate([one.is_trained for one in kept]),
        np.cumsum([0, *map(len, ids)], dtype=np.int64),
        {name: np.concatenate([one.columns[name] for one in kept]) for name in kept[0].columns},
        targets=_targets(graded) if graded else None,
        taken=taken,
        routed=_routed_of_all([one.routed for one in kept]),
    )


def _routed(row: Mapping[str, Any], length: int) -> np.ndarray | None:
    """int16 `[S, L, k]`, -1 at a last token that is missing; None if the row has none. Raises: MalformedError."""
    if _ROUTED not in row:
        return None
    if "input_ids" not in row:
        raise MalformedError(f"{_ROUTED} are of tokens: give input_ids")
    try:
        found = np.array(row[_ROUTED])
    except ValueError:  # lists of unequal length
        found = np.empty(0)
    check_routed(found, length)
    missing = np.full((length - len(found), *found.shape[1:]), -1)
    return np.concatenate([found, missing]).astype(np.int16)  # half of int32: it is as long as all tokens and layers


def check_routed(found: np.ndarray, length: int) -> None:
    """Check the experts of a rollout of `length` tokens. Raises: MalformedError."""
    if found.ndim != 3 or found.dtype.kind not in "ui" or not found.size:
        raise MalformedError(f"{_ROUTED} is no list [tokens][layers][k] of whole numbers")
    if len(found) not in (length, length - 1):
        raise MalformedError(f"{_ROUTED} has {len(found)} tokens, input_ids {length}")
    if found.min() < 0 or found.max() > np.iinfo(np.int16).max:
        raise MalformedError(f"{_ROUTED} holds what is no number of an expert")


def _routed_of_all(routed: list[np.ndarray | None]) -> np.ndarray | None:
    """Those of all rows, end to end. Raises: UserError unless all have them alike, or none."""
    given = [experts for experts in routed if experts is not None]
    if not given:
        return None
    if len(given) < len(routed):
        rule = "a token without them would go to other experts than in the engine"
        raise UserError(f"some rollouts have {_ROUTED} and others not", rule, "give all, or none")
    if len(shapes := {experts.shape[1:] for experts in given}) > 1:
        found = ", ".join(f"{layers} layers of {k}" for layers, k in sorted(shapes))
        raise UserError(f"{_ROUTED}: {found}", "all are of one model", "give those of one")
    return np.concatenate(given)


class _Prompt(tuple[int, ...]):
    """The tokens of a prompt, as the group of its completions."""


def _graded(row: Mapping[str, Any], ids: np.ndarray, is_trained: np.ndarray) -> tuple[float, Hashable]:
    """(reward, group) of a row. Raises: MalformedError."""
    if "reward" not in row:
        raise MalformedError("has no reward")
    if not is_number(row["reward"]):
        raise MalformedError("reward is not a finite number")
    if "group" not in row:
        return row["reward"], _Prompt(ids[: int(is_trained.argmax())].tolist())
    if type(row["group"]) not in (str, int):  # a bool is an int
        raise MalformedError(f"group is {json_type(row['group'])}, a text or a whole number is needed")
    return row["reward"], (type(row["group"]), row["group"])  # "1" and 1 are two groups


def _targets(rewards: list[tuple[float, Hashable]]) -> np.ndarray:
    """(reward, sequences since the first of its group) of each sequence. Raises: UserError."""
    firsts: dict[Hashable, int] = {}
    found = np.empty((len(rewards), 2), dtype=np.float32)
    for number, (reward, group) in enumerate(rewards):
        since = number - firsts.setdefault(group, number)
        assert since < 2**24, "float32 counts so far"
        found[number] = reward, since
    if len({isinstance(group, _Prompt) for group in firsts}) > 1:
        rule = "theirs would be the prompt"
        raise UserError("some rollouts have a group and others not", rule, "give all one, or none")
    if len(firsts) == len(rewards):
        rule = "the rewards of a group are compared with each other, and each has one rollout"
        raise UserError(f"{len(rewards)} rollouts of as many groups", rule, "give several of a prompt one group")
    return found


def _record(row: Mapping[str, Any], origin: str) -> Record | None:
    """The text record of a row; None if it holds tokens instead."""
    text = {name: row[name] for name in row if name in _TEXT_FIELDS}
    if "input_ids" not in row:
        return _TEXTS.choice(tuple(text)).make(text, origin)
    if text:
        raise MalformedError(f"has input_ids and {', '.join(sorted(text))}: one of the two")
    return None


def tokens_of(row: Mapping[str, Any], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """`input_ids` and `is_trained` of a row. Raises: MalformedError."""
    ids, trained = row["input_ids"], row.get("is_trained")
    if not isinstance(ids, list) or len(ids) < 2:
        raise MalformedError("input_ids is not a list of two token ids or more")
    check_tokens(ids, "input_ids", vocab_size)
    if not isinstance(trained, list) or len(trained) != len(ids) or not all(each in (0, 1) for each in trained):
        raise MalformedError("is_trained is not a list of a 0 or 1 for each of input_ids")
    return np.array(ids, dtype=np.int32), np.array(trained, dtype=bool)


def check_tokens(ids: list[Any], name: str, vocab_size: int) -> None:
    """Check that each is a token of the model. Raises: MalformedError."""
    if {*map(type, ids)} - {int}:  # a bool is no token
        raise MalformedError(f"{name} holds what is no whole number")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise MalformedError(f"{name} has a token outside the vocabulary of {vocab_size}")


def _check_numbers(values: list[Any], name: str) -> None:
    if not all(map(is_number, values)):
        raise MalformedError(f"{name} holds what is not a finite number")


def check_log_probs(values: list[Any], name: str) -> None:
    """Check that each is the logarithm of the probability of a token that was sampled. Raises: MalformedError."""
    _check_numbers(values, name)
    if max(values, default=0) > _ROUNDING:
        raise MalformedError(f"{name} holds {max(values):g}: the logarithm of a probability is at most 0")
    if min(values, default=0) < _LEAST_LOG_PROB:
        raise MalformedError(f"{name} holds {min(values):g}: no token of that probability is ever sampled")


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
        value = default
        if given:
            value = _checked_value(row, given[0], is_trained, is_cut=is_cut)
        found = np.zeros(len(is_trained), dtype=np.float32)
        found[is_trained] = value
        columns[column] = found
    return columns


def _checked_value(row: Mapping[str, Any], name: str, is_trained: np.ndarray, *, is_cut: bool) -> Any:
    """A number for all trained tokens, or a list of one for each. Raises: MalformedError."""
    value = row[name]
    if name == TRUNCATED:
        if not isinstance(value, bool):
            raise MalformedError(f"{name} is {json_type(value)}, true or false is needed")
        return value
    if (name in _LISTS) != isinstance(value, list):
        raise MalformedError(f"{name} is {json_type(value)}")
    if not isinstance(value, list):
        _check_numbers([value], name)
        return value
    number = int(is_trained.sum())
    if "input_ids" in row and len(value) == len(is_trained):
        value = [*itertools.compress(value, is_trained)]
    elif is_cut:  # those of the tokens that are left
        value = value[:number]
    if len(value) != number:
        raise MalformedError(f"{name} has {len(value)} numbers for {number} trained tokens")
    if name in _LOG_PROBS:
        check_log_probs(value, name)
    else:
        _check_numbers(value, name)
    return value
