"""Sequences with what a teacher says of them, or sees beside them: records of distillation.

Owns: the fields of recorded teachers; where a context stands in a record. Does not own: tokenisation
(`reading.tokenization`), recording (`meshlora record`), the loss (`run.formulas.distillation`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlora.reading.formats import Format
from meshlora.reading.prompt_styles import record_formats
from meshlora.reading.records import MalformedError, Record
from meshlora.reading.rollouts import check_log_probs, check_tokens, tokens_of
from meshlora.reading.sources import Reading, read_rows
from meshlora.reading.tokenization import tokenize
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELDS = ("teacher_tokens", "teacher_log_probs")
_MOST = 1.001  # the sum of probabilities, rounded
_Likeliest = list[tuple[float, int]]  # (log-probability, token), the likeliest first


def read_taught(
    source: str | list[str], tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, **options: Any
) -> TokenizedDataset:
    """One sequence per row, with columns `teacher_token_J` and `teacher_log_prob_J`, float32 `[N]`, of the J-th
    likeliest token at each trained one; its logarithm is -inf where the teacher names fewer.

    A row has `input_ids`, `is_trained`, and `teacher_tokens` and `teacher_log_probs`: for each trained token, or for
    each token, a list of those that the teacher finds likeliest there, given the tokens before, at temperature 1.

    Raises:
        UserError: malformed rows, the first five with file and line; as `read_rows` and `tokenize`.
    """
    known = [Format("taught", ("input_ids", "is_trained", *FIELDS), lambda row, origin: _row(row, origin, vocab_size))]
    rows = read_rows(source, known, Reading.taken_from(options))
    found = tokenize([record for record, _ in rows], tokenizer, vocab_size=vocab_size, **options)
    assert found.sources is not None
    every = list[_Likeliest]()
    for number, sequence in zip(found.sources.tolist(), found, strict=True):  # which may be cut
        every += rows[number][1][: len(sequence.input_ids)]
    most = max(map(len, every))
    tokens, log_p = np.zeros((most, len(every)), np.float32), np.full((most, len(every)), -np.inf, np.float32)
    for place, likeliest in enumerate(every):
        for rank, (value, token) in enumerate(likeliest):
            tokens[rank, place], log_p[rank, place] = token, value
    own = {f"teacher_token_{rank}": tokens[rank] for rank in range(most)}
    own |= {f"teacher_log_prob_{rank}": log_p[rank] for rank in range(most)}
    return dataclasses.replace(found, columns=own)


def _row(row: Mapping[str, Any], origin: str, vocab_size: int) -> tuple[Record, list[_Likeliest]]:
    """(its tokens; the likeliest ones at each of them)."""
    ids, is_trained = tokens_of(row, vocab_size)
    is_trained[0] = False  # nothing predicts it
    if not is_trained.any():
        raise MalformedError("no trained token")
    chosen, logs = (_of_tokens(row, name, is_trained) for name in FIELDS)
    found: list[_Likeliest] = [[] for _ in ids]
    for place in np.flatnonzero(is_trained).tolist():
        own, log_p = chosen[place], logs[place]
        if not own or not log_p or len(own) != len(log_p):
            raise MalformedError(f"{FIELDS[0]} and {FIELDS[1]} at token {place} are not two lists of one length")
        check_tokens(own, FIELDS[0], vocab_size)
        check_log_probs(log_p, FIELDS[1])
        if len({*own}) < len(own):
            raise MalformedError(f"{FIELDS[0]} has one twice at token {place}")
        if np.exp(log_p).sum() > _MOST:
            raise MalformedError(f"{FIELDS[1]} at token {place}: their probabilities are more than 1 together")
        found[place] = sorted(zip(log_p, own, strict=True), reverse=True)
    return Record(tokens=(tuple(ids.tolist()), tuple(is_trained.tolist())), origin=origin), found


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


def read_in_context(
    source: str | list[str], tokenizer: PreTrainedTokenizerBase, *, context: str, **options: Any
) -> TokenizedDataset:
    """Sequence 2i is record i as the student sees it; 2i + 1 as its teacher does, with `context` before it.

    Of a conversation it is the turn of the system, before what that says already; of a prompt the first paragraph.

    Raises:
        UserError: plain texts; trained tokens that differ between the two; as `read_rows` and `tokenize`.
    """
    reading = dataclasses.replace(Reading.taken_from(options, tokenizer), has_separator=True)
    records = read_rows(source, record_formats(None), reading)
    found = tokenize([(one, with_context(one, context)) for one in records], tokenizer, **options)
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
