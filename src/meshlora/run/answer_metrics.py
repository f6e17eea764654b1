"""What one generated answer is worth against its references, by each of `generate.metrics`.

Owns: the built-in metrics, and calling a user's function. Does not own: their names and options (`run.config.metrics`),
the answers, and which rank computes (`run.answers`), scores of whole sets (`meshlora_extra.paper.scores`).

    values = Measures(["exact_match", "mine.py:close"]).means([Answer("2 + 2 =", "4", ("4",), "eval.jsonl:1")])
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshlora.run.config.metrics import Metric, RegexMetric, name_of
from meshlora_ground.errors import UserError, one_line, reason
from meshlora_ground.limits import OutOfTimeError, time_limit
from meshlora_ground.reading import parse_json
from meshlora_ground.user_code import load_function

_PATTERN_S = 2.0  # for one answer: a pattern may take exponential time


@dataclass(frozen=True)
class Answer:
    """What a model said. prompt: as it was asked. references: one or more, stripped. origin: of the prompt's record."""

    prompt: str
    text: str
    references: tuple[str, ...]
    origin: str


# (prompt, answer, one reference) -> what it is worth.
Measure = Callable[[str, str, str], Any]


class Measures:
    """`generate.metrics`, ready to be computed. Loads the user's functions. Raises: UserError: there is no such one."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._measures: dict[str, Measure] = {}
        for metric in metrics:
            self._measures[name_of(metric)] = _measure(metric)
        self._parses = "json_match" in self._measures

    def check(self, references: Sequence[str], origin: str) -> None:
        """Check the references of a record for what the metrics need. Raises: UserError: one is no JSON."""
        if not self._parses:
            return
        for reference in references:
            try:
                parse_json(reference)
            except ValueError as error:
                given = f"generate.metrics: json_match of {origin}"
                rule = f"its reference {reference[:80]!r} is no JSON ({reason(error)})"
                raise UserError(given, rule, "correct the row, or use exact_match") from None

    def means(self, answers: Sequence[Answer]) -> dict[str, float]:
        """The mean over `answers`, at least one, of each metric. Of several references the one counts that is best.

        Raises:
            UserError: a metric failed on an answer, or gave no finite number; its row is named.
        """
        found = {}
        for name, measure in self._measures.items():
            values = [max(_value(name, measure, answer, one) for one in answer.references) for answer in answers]
            found[name] = math.fsum(values) / len(values)  # exact: the order of the rows does not matter
        return found


def _value(name: str, measure: Measure, answer: Answer, reference: str) -> float:
    where = f"generate.metrics: {name} of the answer {answer.text[:120]!r} to {answer.origin}"
    try:
        value = measure(answer.prompt, answer.text, reference)
    except OutOfTimeError:
        raise UserError(where, f"it took longer than {_PATTERN_S:g} s", "write a simpler pattern") from None
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise UserError(where, f"it raised {type(error).__name__} ({one_line(f'{error}', 400)})") from error
    try:
        number = float(value)  # also of numpy and torch
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(where, f"it is {value!r}, no finite number", "return a number, or True or False")
    return number


def _measure(metric: Metric) -> Measure:
    if isinstance(metric, RegexMetric):
        pattern = re.compile(metric.regex)
        return functools.partial(_found, pattern.fullmatch if metric.whole else pattern.search)
    if metric in _BUILT_IN:
        return _BUILT_IN[metric]
    return load_function("generate.metrics", metric)


def _exact_match(prompt: str, answer: str, reference: str) -> bool:
    return answer.strip() == reference.strip()


def _json_valid(prompt: str, answer: str, reference: str) -> bool:
    try:
        parse_json(answer.strip())  # strict: bounded, no key twice
    except ValueError:
        return False
    return True


def _json_match(prompt: str, answer: str, reference: str) -> bool:
    try:
        said = parse_json(answer.strip())
    except ValueError:
        return False
    return _is_same_json(said, parse_json(reference))


def _is_same_json(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: keys in any order, 1 as 1.0, but true is no 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same_json, one, other))
    if isinstance(one, bool) != isinstance(other, bool):  # to Python True is 1
        return False
    return bool(one == other)


def _found(search: Callable[[str], object], prompt: str, answer: str, reference: str) -> bool:
    with time_limit(_PATTERN_S):
        return search(answer.strip()) is not None


_BUILT_IN: dict[str, Measure] = {"exact_match": _exact_match, "json_valid": _json_valid, "json_match": _json_match}
