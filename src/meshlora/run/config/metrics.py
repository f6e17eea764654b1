"""`generate.metrics`: what generated answers are measured by, as a run file says it.

Owns: names and forms of metrics, and rules that need no file. Does not own: their values (`run.answer_metrics`), the
answers (`run.answers`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshlora_ground.errors import UserError, did_you_mean
from meshlora_ground.user_code import file_of, is_function

BUILT_IN = ("exact_match", "json_valid", "json_match")
# What lines of evaluations have already, as in `eval_loss`.
_TAKEN = ("loss", "tokens", "perplexity", "answers")
_NAME = re.compile(r"[A-Za-z_]\w{0,59}", re.ASCII)


@dataclass(frozen=True)
class RegexMetric:
    """1 for an answer in which a pattern is found.

    Attributes:
        regex: a regular expression. whole: it is to be the whole answer, without spaces around it.
        name: of the metric, where there are several.
    """

    regex: str
    whole: bool = False
    name: str = "regex"

    def __post_init__(self) -> None:
        try:
            re.compile(self.regex)
        except re.error as error:
            given = f"generate.metrics: regex: {self.regex!r}"
            raise UserError(given, f"it is no regular expression ({error})") from None


Metric = str | RegexMetric


def name_of(metric: Metric) -> str:
    """Its name in `metrics.jsonl`, without `eval_`, and in `train.early_stopping.metric`; of a function, its own."""
    if isinstance(metric, RegexMetric):
        return metric.name
    return metric.rpartition(":")[2]


def code_of(metrics: Sequence[Metric]) -> list[Path]:
    """The files of a user's functions."""
    files = [file_of(one) for one in metrics if isinstance(one, str) and is_function(one)]
    return [file for file in files if file is not None]


def check_metrics(metrics: Sequence[Metric]) -> None:
    """Raises: UserError: there is no such metric; two have one name; a name that is taken."""
    names = list[str]()
    for one in metrics:
        if isinstance(one, str) and one not in BUILT_IN and not is_function(one):
            rule = "there is no such metric, and it names no function, as path/to/file.py:function does"
            raise UserError(f"generate.metrics: {one!r}", rule, did_you_mean(one, (*BUILT_IN, "regex")))
        name = name_of(one)
        if not _NAME.fullmatch(name) or name in _TAKEN:
            rule = f"it is to be a name of letters, digits and _, and none of {', '.join(_TAKEN)}"
            raise UserError(f"generate.metrics: {name!r}", rule, "give it another name")
        if name in names:
            given = f"generate.metrics: two are named {name}"
            raise UserError(given, "its numbers would have one name", "give one another name: {regex: ..., name: ...}")
        names.append(name)
