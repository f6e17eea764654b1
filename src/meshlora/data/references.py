"""Prompts and the texts that are right after them, for scores of generated text.

Owns: which records are references of one prompt. Does not own: reading records (`sources.py`), scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshlora.common.errors import UserError
from meshlora.data.records import Record


@dataclass(frozen=True)
class Prompt:
    """What is given to the model, and what may come of it. origin: of its first record."""

    text: str
    references: tuple[str, ...]
    origin: str


def prompts_of(records: Sequence[Record]) -> list[Prompt]:
    """One prompt for neighbouring records with the same `prompt`, whose completions are its references, stripped.

    Raises:
        UserError: a record is not a prompt with its completion.
    """
    grouped: list[tuple[Record, list[str]]] = []
    for record in records:
        if record.prompt is None or record.completion is None:
            raise UserError(
                f"{record.origin}: a record of {record.kind}",
                "only records of prompt and completion say what a generated text is compared with",
                "give such a file with --data, or leave out --generate",
            )
        if not grouped or grouped[-1][0].prompt != record.prompt:
            grouped.append((record, []))
        grouped[-1][1].append(record.completion.strip())
    return [Prompt(first.prompt or "", tuple(references), first.origin) for first, references in grouped]
