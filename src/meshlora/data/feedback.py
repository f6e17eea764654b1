"""Single answers that were liked or not, each beside an answer to another prompt.

Owns: the fields of such a record, and which other answer stands beside it. Does not own: tokens (`data.tokenization`),
what is made of them (`train.objectives`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlora.common.errors import UserError
from meshlora.data.preferences import record_of
from meshlora.data.records import MalformedError, Problems, json_type
from meshlora.data.rows import Row, check_fields, read_rows
from meshlora.data.tokenization import LossOn, TokenizedDataset, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELDS = ("prompt", "completion", "label")


def read_feedback(
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
    """Sequence 2i is record i; 2i + 1 is its prompt with the completion of the nearest record before it (before the
    first is the last) that has another prompt. Column `desirable`, float32 `[N]`: 1 or -1.

    A row has `prompt`, `completion` and `label`, true or false; prompt and completion are text, or lists of messages.
    Tokens and truncation, `vocab_size` and `say` are those of `tokenize`.

    Raises:
        UserError: malformed rows, the first five with file and line; records that all have one prompt; what `read_rows`
            and `tokenize` refuse.
    """
    mistakes = Problems("{prompt, completion, label}, label true or false")
    rows: list[Row] = []
    for origin, row in read_rows(source, mistakes, known=FIELDS, columns=columns, say=say):
        try:
            check_fields(row, FIELDS)
            record_of(row, "completion", origin)
            if not isinstance(row.get("label"), bool):
                raise MalformedError(f"label is {json_type(row['label'])}" if "label" in row else "'label' is missing")
            if rows and isinstance(row["completion"], list) != isinstance(rows[0][1]["completion"], list):
                raise MalformedError("messages in some records and text in others")
            rows.append((origin, row))
        except MalformedError as reason:
            mistakes.add(origin, reason)
    mistakes.raise_if_any()
    others = _before_with_another_prompt([row.get("prompt") for _, row in rows])
    records = []
    for (origin, row), other in zip(rows, others, strict=True):
        beside = {**row, "completion": rows[other][1]["completion"]}
        records += [record_of(each, "completion", origin) for each in (row, beside)]
    options: dict[str, Any] = {"loss_on": loss_on, "cache_dir": cache_dir, "vocab_size": vocab_size, "say": say}
    tokens = tokenize(records, tokenizer, max_length=max_length, **options)
    signs = np.repeat([1.0 if row["label"] else -1.0 for _, row in rows], 2).astype(np.float32)
    return dataclasses.replace(
        tokens, columns={"desirable": np.repeat(signs, np.diff(tokens.offsets))}, rows_per_example=2
    )


def _before_with_another_prompt(prompts: list[Any]) -> list[int]:
    """Of each prompt the place of the nearest one before it that differs, counted round."""
    number, found = len(prompts), [-1] * len(prompts)
    for place in range(1, 2 * number):  # twice round: the first ones look at the last ones
        one, before = place % number, (place - 1) % number
        found[one] = before if prompts[before] != prompts[one] else found[before]
    if -1 in found:
        raise UserError(
            "records that all have one prompt",
            "the divergence from the base is estimated with answers to other prompts",
            "give records with another prompt",
        )
    return found
