"""Styles in which instructions are written as plain text: `data.prompt`.

Owns: the words around what is asked, and which rows they are for. Does not own: chat templates (`named_templates.py`),
how rows are known by their fields (`formats.py`). The text is the same for any model, also for one that has a chat
template: that is what a style is for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from meshlora.reading.formats import PAIRS, RECORDS, Format
from meshlora.reading.records import Record, checked_text, filled_text
from meshlora_ground.errors import UserError, did_you_mean

# (what is asked, what it is about, or "") -> the text before the answer
Style = Callable[[str, str], str]


def _alpaca(asked: str, about: str) -> str:
    """Stanford Alpaca's; its sections end in a newline, as axolotl, torchtune and LLaMA-Factory write them."""
    if about:
        return (
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n"
            f"### Instruction:\n{asked}\n\n### Input:\n{about}\n\n### Response:\n"
        )
    return (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{asked}\n\n### Response:\n"
    )


def _question(asked: str, about: str) -> str:
    """Few-shot evaluations' (lm-evaluation-harness): the answer follows after a space."""
    before = f"{about}\n\n" if about else ""
    return f"{before}Question: {asked}\nAnswer:"


# Name -> (what writes the prompt, what stands between it and the answer and is the answer's).
STYLES: Mapping[str, tuple[Style, str]] = {"alpaca": (_alpaca, ""), "qa": (_question, " ")}


def record_formats(style: str | None) -> tuple[Format[Record], ...]:
    """The formats of records, all as they are, or those that `style` writes.

        record_formats("alpaca")  # rows of instruction and output, question and answer, ...

    Raises:
        UserError: there is no such style.
    """
    if style is None:
        return RECORDS
    if style not in STYLES:
        raise UserError(f"data.prompt={style}", "there is no such style", did_you_mean(style[:60], STYLES))
    write = functools.partial(_styled, style)
    found = [Format("alpaca", ("instruction", "output"), functools.partial(write, "instruction", "output"), ("input",))]
    for asked, answer in PAIRS:
        about = ("context",) if asked == "instruction" else ()
        make = functools.partial(write, asked, answer)
        found.append(Format("user_assistant", (asked, answer), make, about, weakness=1))
    return tuple(found)


def _styled(style: str, asked: str, answer: str, row: Mapping[str, Any], origin: str) -> Record:
    write, between = STYLES[style]
    about = checked_text(row.get("input", row.get("context", "")), "input")
    prompt = write(filled_text(row[asked], asked), about)
    return Record(prompt=prompt, completion=between + filled_text(row[answer], answer), origin=origin)
