"""Pairs of answers, a better and a worse one, as neighbouring sequences.

Owns: the fields of a pair. Does not own: tokens (`data.tokenization`), what is made of pairs (`train.objectives`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshlora.data.records import MalformedError, Problems, Record, build_record, json_type
from meshlora.data.rows import check_fields, read_rows
from meshlora.data.tokenization import LossOn, TokenizedDataset, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELDS = ("prompt", "chosen", "rejected")


def read_preferences(
    source: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    loss_on: LossOn = "completion",
    columns: Mapping[str, str] | None = None,
    cache_dir: Path | None = None,
    vocab_size: int | None = None,
    say: Callable[[str], None] | None = None,
) -> TokenizedDataset:
    """Sequences 2i and 2i + 1 are the chosen and the rejected answer of pair i.

    A row has `prompt`, `chosen` and `rejected`: all text, or `chosen` and `rejected` lists of messages, before which
    those of `prompt` stand if there are any. Tokens and truncation, `vocab_size` and `say` are those of `tokenize`.

    Raises:
        UserError: malformed rows, the first five with file and line; what `read_rows` and `tokenize` refuse.
    """
    mistakes = Problems("{prompt, chosen, rejected}, the last two text, or lists of messages")
    records: list[Record] = []
    for origin, row in read_rows(source, mistakes, known=FIELDS, columns=columns, say=say):
        try:
            check_fields(row, FIELDS)
            pair = [record_of(row, name, origin) for name in ("chosen", "rejected")]
            if _content(pair[0]) == _content(pair[1]):
                raise MalformedError("chosen and rejected are the same")
            records += pair
        except MalformedError as reason:
            mistakes.add(origin, reason)
    mistakes.raise_if_any()
    tokens = tokenize(
        records,
        tokenizer,
        max_length=max_length,
        loss_on=loss_on,
        cache_dir=cache_dir,
        vocab_size=vocab_size,
        say=say,
    )
    return dataclasses.replace(tokens, rows_per_example=2)


def record_of(row: Mapping[str, Any], name: str, origin: str) -> Record:
    """`prompt` of a row with its answer `name`, text or messages. Raises: MalformedError."""
    if name not in row:
        raise MalformedError(f"{name!r} is missing")
    answer, prompt = row[name], row.get("prompt")
    if isinstance(answer, list):
        if prompt is not None and not isinstance(prompt, list):
            raise MalformedError(f"{name} is a list of messages, prompt is {json_type(prompt)}")
        return build_record({"messages": [*(prompt or []), *answer]}, {"messages": "messages"}, origin=origin)
    values = {"prompt": "" if prompt is None else prompt, "completion": answer}
    return build_record(values, {"prompt": "prompt", "completion": "completion"}, origin=origin)


def _content(record: Record) -> Any:
    return record.completion if record.messages is None else record.messages
