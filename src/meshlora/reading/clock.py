"""The date that chat templates write: `data.date`.

Owns: whether a template asks for it, the day at which a tokenizer's clock stands, and the clock of transformers, which
renders templates. Does not own: which day that is in a run (`run.prepare`), rendering (`chat.py`).

A template that calls `strftime_now` makes other tokens tomorrow. So the clock stands still: at the day that was set for
the tokenizer, else at today's.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING

from transformers.utils import chat_template_utils

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLOCK = re.compile(r"(?<!\w)strftime_now(?!\w)")
_DAY = "day_of_its_clock"  # attribute of a tokenizer


def today() -> str:
    """The day in UTC, as `2026-01-15`."""
    return datetime.now(UTC).date().isoformat()


def set_day(tokenizer: PreTrainedTokenizerBase, day: str) -> None:
    """Let the clock of the tokenizer's chat template stand at `day`."""
    setattr(tokenizer, _DAY, day)


def day_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The day at which the clock of the tokenizer's chat template stands."""
    day: str | None = getattr(tokenizer, _DAY, None)
    return day or today()


def written_day(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The day that the default chat template of the tokenizer writes; None if it asks for none."""
    template: object = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if isinstance(template, str) and _CLOCK.search(template):
        return day_of(tokenizer)
    return None


def stop_clock(day: str) -> None:
    """Let all templates of this process, which is to end soon, find that it is `day`.

    transformers turns what a template is given into plain data, a function too (5.23), and looks its own clock up here.
    """
    moment = datetime.fromisoformat(day)  # its midnight: templates that write the hour write 00:00
    vars(chat_template_utils)["datetime"] = SimpleNamespace(now=lambda: moment)
