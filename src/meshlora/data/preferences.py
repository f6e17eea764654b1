"""Preference data as adjacent sequences: pairs of answers, or labelled answers next to an answer to another prompt.
Owns: the fields of such records, and which other answer accompanies a single one. Does not own: tokenisation
(`data.tokenization`), the losses (`train.objectives`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlora.common.errors import UserError
from meshlora.data.formats import build_record
from meshlora.data.records import MalformedError, Record, json_type
from meshlora.data.sources import Row, read_rows
from meshlora.data.tokenization import TokenizedDataset, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_preferences(
    source: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    columns: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> TokenizedDataset:
    """Sequences 2i and 2i + 1 are the chosen and the rejected answer of pair i.

    A row has `prompt`, `chosen` and `rejected`: all text, or `chosen` and `rejected` lists of messages that continue
    those of an optional `prompt`. Tokens and truncation, `say` and `options` are those of `tokenize`.

    Raises:
        UserError: as `read_rows` and `tokenize`.
    """

    def pair(row: Mapping[str, Any], origin: str) -> list[Record]:
        chosen, rejected = (_record_of(row, name, origin) for name in ("chosen", "rejected"))
        if (chosen.completion, chosen.messages) == (rejected.completion, rejected.messages):
            raise MalformedError("chosen and rejected are the same")
        return [chosen, rejected]

    what = "{prompt, chosen, rejected}, the last two text, or lists of messages"
    pairs = read_rows(source, pair, what=what, known=("prompt", "chosen", "rejected"), columns=columns, say=say)
    tokens = tokenize([record for pair in pairs for record in pair], tokenizer, say=say, **options)
    return dataclasses.replace(tokens, rows_per_example=2)


def read_feedback(
    source: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    columns: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> TokenizedDataset:
    """Sequence 2i is record i; 2i + 1 is its prompt with the completion of the nearest earlier record (cyclically)
    with another prompt. Column `desirable`, float32 `[N]`: 1 or -1.

    A row has `prompt`, `completion` and `label`, true or false; prompt and completion are text, or lists of messages.
    Tokens and truncation, `say` and `options` are those of `tokenize`.

    Raises:
        UserError: all records have the same prompt; as `read_rows` and `tokenize`.
    """
    is_of_messages: set[bool] = set()

    def checked(row: dict[str, Any], origin: str) -> Row:
        _record_of(row, "completion", origin)
        if not isinstance(row.get("label"), bool):
            raise MalformedError(f"label is {json_type(row['label'])}" if "label" in row else "'label' is missing")
        kind = isinstance(row["completion"], list)
        if is_of_messages - {kind}:
            raise MalformedError("messages in some records and text in others")
        is_of_messages.add(kind)
        return origin, row

    what = "{prompt, completion, label}, label true or false"
    rows = read_rows(source, checked, what=what, known=("prompt", "completion", "label"), columns=columns, say=say)
    others = _before_with_another_prompt([row.get("prompt") for _, row in rows])
    records = []
    for (origin, row), other in zip(rows, others, strict=True):
        beside = {**row, "completion": rows[other][1]["completion"]}
        records += [_record_of(each, "completion", origin) for each in (row, beside)]
    tokens = tokenize(records, tokenizer, say=say, **options)
    signs = np.repeat([1.0 if row["label"] else -1.0 for _, row in rows], 2).astype(np.float32)
    return dataclasses.replace(
        tokens, columns={"desirable": np.repeat(signs, np.diff(tokens.offsets))}, rows_per_example=2
    )


def _before_with_another_prompt(prompts: list[Any]) -> list[int]:
    """For each prompt the index of the nearest earlier one that differs, cyclically."""
    number, found = len(prompts), [-1] * len(prompts)
    for place in range(1, 2 * number):  # two rounds, as the first prompts look back at the last
        one, before = place % number, (place - 1) % number
        found[one] = before if prompts[before] != prompts[one] else found[before]
    if -1 in found:
        raise UserError(
            "records that all have one prompt",
            "the divergence from the base is estimated with answers to other prompts",
            "give records with another prompt",
        )
    return found


def _record_of(row: Mapping[str, Any], name: str, origin: str) -> Record:
    """The record of a row's `prompt` with its answer `name`, text or messages. Raises: MalformedError."""
    if name not in row:
        raise MalformedError(f"{name!r} is missing")
    answer, prompt = row[name], row.get("prompt")
    if isinstance(answer, list):
        if prompt is not None and not isinstance(prompt, list):
            raise MalformedError(f"{name} is a list of messages, prompt is {json_type(prompt)}")
        return build_record({"messages": [*(prompt or []), *answer]}, origin=origin)
    return build_record({"prompt": "" if prompt is None else prompt, "completion": answer}, origin=origin)
