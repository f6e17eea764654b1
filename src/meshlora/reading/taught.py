"""Sequences with what a teacher says of them, or sees beside them: records of distillation.

Owns: the fields of recorded teachers; where a context stands in a record. Does not own: tokenisation
(`reading.tokenization`), recording (`meshlora record`), the loss (`run.formulas.distillation`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlora.reading.formats import Format
from meshlora.reading.records import MalformedError, Problems, Record
from meshlora.reading.rollouts import check_log_probs, check_tokens, tokens_of
from meshlora.reading.sources import Reading, read_records, read_rows
from meshlora.reading.tokenization import tokenize
from meshlora_ground.dataset import Taken, TokenizedDataset
from meshlora_ground.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IDS, LOG_PROBS = "teacher_tokens", "teacher_log_probs"
_MOST = 1.001  # the sum of probabilities, rounded


def read_taught(
    source: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    vocab_size: int,
    too_long: str = "truncate",
    columns: Mapping[str, str] | None = None,
    format: str = "auto",
    say: Callable[[str], None] | None = None,
    names_rows: bool = False,
    **_: Any,
) -> TokenizedDataset:
    """One sequence per row, with columns `teacher_token_J` and `teacher_log_prob_J`, float32 `[N]`, of the J-th
    likeliest token at each trained one; its logarithm is -inf where the teacher names fewer.

    A row has `input_ids`, `is_trained`, and `teacher_tokens` and `teacher_log_probs`: for each trained token, or for
    each token, a list of those that the teacher finds likeliest there, given the tokens before, at temperature 1.

    Raises:
        UserError: malformed rows, the first five with file and line; as `read_rows`.
    """
    known = [Format("taught", ("input_ids", "is_trained", IDS, LOG_PROBS), lambda row, origin: (origin, row))]
    rows = read_rows(source, known, Reading(columns, format, say))
    mistakes = Problems(f"{{input_ids, is_trained, {IDS}, {LOG_PROBS}}}")
    kept, origins, first, num_long = list[_Row](), list[str](), "", 0
    for origin, row in rows:
        try:
            one = _row(row, vocab_size)
            is_long = len(one.ids) > max_length
            if is_long and too_long == "error":
                raise MalformedError(f"{len(one.ids)} tokens, max_length={max_length}")
            num_long, first = num_long + is_long, first or origin * is_long
            if is_long and too_long == "drop":
                continue
            if not one.is_trained[1:max_length].any():
                raise MalformedError(f"no trained token within max_length={max_length}")
        except MalformedError as reason:
            mistakes.add(origin, reason)
            continue
        kept.append(one.cut(max_length))
        origins.append(origin)
    mistakes.raise_if_any()
    taken = Taken(len(rows), max_length, too_long, num_long, len(rows) - len(kept), first)
    if not kept:
        raise UserError(f"{len(rows)} records, all longer than {max_length} tokens", "nothing is left to train")
    if say is not None and (words := taken.words(len(kept))):
        say(words)
    return _dataset(kept, taken, origins if names_rows else None)


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row that was read. tokens: at each token the teacher's likeliest, with their logarithms, likeliest first."""

    ids: np.ndarray
    is_trained: np.ndarray
    tokens: list[list[tuple[float, int]]]

    def cut(self, length: int) -> _Row:
        return _Row(self.ids[:length], self.is_trained[:length], self.tokens[:length])


def _row(row: Mapping[str, Any], vocab_size: int) -> _Row:
    ids, is_trained = tokens_of(row, vocab_size)
    is_trained[0] = False  # nothing predicts it
    chosen, logs = (_of_tokens(row, name, is_trained) for name in (IDS, LOG_PROBS))
    found: list[list[tuple[float, int]]] = [[] for _ in ids]
    for place in np.flatnonzero(is_trained).tolist():
        own, log_p = chosen[place], logs[place]
        if len(own) != len(log_p) or not own:
            raise MalformedError(f"{len(own)} {IDS} and {len(log_p)} {LOG_PROBS} at token {place}")
        check_tokens(own, IDS, vocab_size)
        check_log_probs(log_p, LOG_PROBS)
        if len({*own}) < len(own):
            raise MalformedError(f"{IDS} has one twice at token {place}")
        if np.exp(log_p).sum() > _MOST:
            raise MalformedError(f"{LOG_PROBS} at token {place}: their probabilities are more than 1 together")
        found[place] = sorted(zip(log_p, own, strict=True), reverse=True)
    return _Row(ids, is_trained, found)


def _of_tokens(row: Mapping[str, Any], name: str, is_trained: np.ndarray) -> list[Any]:
    """The lists of `name`, one for each token."""
    given, number = row[name], int(is_trained.sum())
    if not isinstance(given, list) or not all(isinstance(each, list | None) for each in given):
        raise MalformedError(f"{name} is not a list of lists")
    if len(given) == len(is_trained):
        return given
    if len(given) != number:
        raise MalformedError(f"{name} has {len(given)} lists for {number} trained tokens")
    found: list[Any] = [None] * len(is_trained)
    for place, each in zip(np.flatnonzero(is_trained).tolist(), given, strict=True):
        found[place] = each
    return found


def _dataset(kept: list[_Row], taken: Taken, origins: list[str] | None) -> TokenizedDataset:
    ids = [one.ids for one in kept]
    every = [at for one in kept for at in one.tokens]
    most = max(map(len, every))
    tokens, log_p = np.zeros((most, len(every)), np.float32), np.full((most, len(every)), -np.inf, np.float32)
    for place, found in enumerate(every):
        for rank, (value, token) in enumerate(found):
            tokens[rank, place], log_p[rank, place] = token, value
    columns = {f"teacher_token_{rank}": tokens[rank] for rank in range(most)}
    columns |= {f"teacher_log_prob_{rank}": log_p[rank] for rank in range(most)}
    offsets, is_trained = np.cumsum([0, *map(len, ids)], dtype=np.int64), np.concatenate([o.is_trained for o in kept])
    return TokenizedDataset(np.concatenate(ids), is_trained, offsets, columns, taken=taken, origins=origins)


def read_in_context(
    source: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: str,
    columns: Mapping[str, str] | None = None,
    format: str = "auto",
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> TokenizedDataset:
    """Sequence 2i is record i as the student sees it; 2i + 1 as its teacher does, with `context` before it.

    Of a conversation it is the turn of the system, before what that says already; of a prompt the first paragraph.

    Raises:
        UserError: plain texts; trained tokens that differ between the two; as `read_records` and `tokenize`.
    """
    bad, has_template = options.get("on_bad_row", "error"), bool(tokenizer.chat_template)
    records = read_records(source, columns=columns, format=format, say=say, on_bad_row=bad, has_template=has_template)
    found = tokenize([(one, with_context(one, context)) for one in records], tokenizer, say=say, **options)
    for example in range(found.num_examples):
        own, seen = (found[2 * example + row] for row in (0, 1))
        if own.input_ids[1:][own.is_trained[1:]].tolist() != seen.input_ids[1:][seen.is_trained[1:]].tolist():
            given = f"train.objective.context: example {example}"
            rule = "student and teacher are compared at the same trained tokens, and theirs differ"
            raise UserError(given, rule, "raise data.max_length, or set data.too_long: drop")
    return found


def with_context(record: Record, context: str) -> Record:
    """The record as a teacher sees it. Raises: UserError: a plain text."""
    if record.messages is not None:
        first, turns = record.messages[0], record.messages
        if first["role"] in ("system", "developer") and isinstance(first["content"], str):
            context, turns = f"{context}\n\n{first['content']}", turns[1:]
        return dataclasses.replace(record, messages=({"role": "system", "content": context}, *turns))
    if record.prompt is None:
        rule = "a context stands before a prompt or a conversation"
        raise UserError(f"{record.origin}: a {record.kind}", rule, "give records with a prompt, or with messages")
    return dataclasses.replace(record, prompt=f"{context}\n\n{record.prompt}")
