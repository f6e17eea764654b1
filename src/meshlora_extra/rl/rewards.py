"""What completions are worth: the weighted sum of a run's rewards, each computed once.

Owns: the built-in rewards, calling a user's function, naming the completion that a reward fails on. Does not own: their
options (`run.config.rl`), running tests (`rl.unit_tests`), a reward model (`rl.reward_model`).

    rewards = Rewards([RegexReward(pattern="yes"), FunctionReward(name="rewards.py:shortness", weight=0.1)])
    scored = rewards([Completion("Is it?", "yes, it is", {}, "prompts.jsonl:1")])    # [Scored(total=1.0 + ..., ...)]

Only the rank that writes the rollouts calls this; the others read what it wrote.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshlora.run.config.rl import (
    FunctionReward,
    JsonSchemaReward,
    MatchReward,
    ModelReward,
    RegexReward,
    UnitTestsReward,
)
from meshlora_extra.rl.prompts import Prompt
from meshlora_extra.rl.reward_model import RewardModel
from meshlora_extra.rl.sandbox import WAY_OUT
from meshlora_extra.rl.unit_tests import code_in, run_tests
from meshlora_ground.errors import MeshloraError, UserError, reason
from meshlora_ground.files import read_json
from meshlora_ground.limits import OutOfTimeError, time_limit
from meshlora_ground.reading import parse_json
from meshlora_ground.user_code import load_function

_PATTERN_S = 2.0  # for one completion: a pattern may take exponential time
# A sign after a number, a letter or a bracket is a minus of two: 5-42.
_NUMBER = re.compile(r"((?<![\w.)\]])[-+])?([0-9][0-9,]*|(?=\.[0-9]))(?:\.([0-9]*))?(?:[eE]([-+]?[0-9]+))?")
_EXPONENT_DIGITS = 18


@dataclass(frozen=True)
class Completion:
    """What a model said. prompt: as text. fields: of the prompt's record. origin: where that stands."""

    prompt: str
    text: str
    fields: Mapping[str, Any]
    origin: str


@dataclass(frozen=True)
class Scored:
    """total: the weighted sum. parts: the value of each reward, by name, without its weight. failed: the names of those
    that could not judge the completion, and count as 0."""

    total: float
    parts: Mapping[str, float]
    failed: tuple[str, ...] = ()


Score = Callable[[Sequence[Completion]], Sequence[float]]


class Rewards:
    """A run's rewards, ready to be computed. Raises: UserError: no function, no file, no schema, no room for tests."""

    def __init__(self, given: Sequence[Any]) -> None:
        self._scores: dict[str, tuple[float, Score]] = {}
        self._needs: dict[str, Callable[[Completion], object]] = {}
        for number, one in enumerate(given):
            name = str(one.name if isinstance(one, FunctionReward) else one.kind)
            if name in self._scores:
                name = f"{name} {number + 1}"
            self._scores[name] = (one.weight, _MAKERS[type(one)](one, f"rl.rewards.{number} ({name})"))
            if type(one) in _NEEDS:
                self._needs[name] = functools.partial(_NEEDS[type(one)], one)

    def __call__(self, completions: Sequence[Completion]) -> list[Scored]:
        """Raises: UserError: a reward failed on a completion, or gave no finite number; it is named."""
        values = {name: score(completions) for name, (_, score) in self._scores.items()}
        found = []
        for place, completion in enumerate(completions):
            failed = tuple(name for name, of_all in values.items() if isinstance(of_all[place], _Failed))
            parts = {name: _number(of_all[place], name, completion) for name, of_all in values.items()}
            # Exact: the order of rewards does not matter.
            total = math.fsum(self._scores[name][0] * value for name, value in parts.items())
            found.append(Scored(total, parts, failed))
        return found

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Check each prompt's record for what the rewards need of it. Raises: UserError: the first that lacks it."""
        for prompt in prompts:
            said = Completion(prompt.text, "", prompt.fields, prompt.origin)
            for name, needs in self._needs.items():
                try:
                    needs(said)
                except UserError as error:
                    given = f"{prompt.origin}: reward {name}"
                    raise UserError(given, f"{error.given}: {error.rule}", error.way_out) from None


def _number(value: Any, name: str, completion: Completion) -> float:
    try:
        number = float(value)  # also of numpy and torch
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(_of(name, completion), f"it is {value!r}, no finite number")
    return number


def _of(name: str, completion: Completion) -> str:
    return f"reward {name} of the completion {completion.text[:120]!r} of {completion.origin}"


def _each(name: str, score: Callable[[Completion], Any], *, on_failure: str = "stop") -> Score:
    """One completion at a time. What `score` raises names the completion. on_failure: of what it cannot judge."""

    def of_all(completions: Sequence[Completion]) -> list[Any]:
        values = []
        for completion in completions:
            try:
                values.append(score(completion))
            except _UnjudgedError as error:
                if on_failure == "stop":
                    way_out = f"{error.way_out}, or count it as 0: on_failure: zero"
                    raise UserError(_of(name, completion), f"{error.given}: {error.rule}", way_out) from None
                values.append(_Failed())
            except UserError as error:
                raise UserError(_of(name, completion), f"{error.given}: {error.rule}", error.way_out) from None
            except (Exception, SystemExit) as error:  # a user's function may raise anything
                raise UserError(_of(name, completion), f"it raised {type(error).__name__} ({reason(error)})") from error
        return values

    return of_all


def _regex(one: RegexReward, name: str) -> Score:
    pattern = re.compile(one.pattern)
    search = pattern.fullmatch if one.whole else pattern.search

    def score(completion: Completion) -> float:
        with _judged(f"the pattern {one.pattern!r}"):
            return float(search(completion.text) is not None)

    return _each(name, score, on_failure=one.on_failure)


class _Failed(float):
    """0, for a completion that could not be judged."""


class _UnjudgedError(UserError):
    """A completion that a reward cannot judge."""


@contextlib.contextmanager
def _judged(by: str) -> Iterator[None]:
    """Limits for one completion. Raises: _UnjudgedError."""
    try:
        with time_limit(_PATTERN_S):
            yield
    except (OutOfTimeError, RecursionError) as error:
        is_late = isinstance(error, OutOfTimeError)
        rule = f"it took longer than {_PATTERN_S:g} s" if is_late else "it recurses too deeply"
        raise _UnjudgedError(by, rule, "write a simpler one") from None


def _json_schema(one: JsonSchemaReward, name: str) -> Score:
    try:
        import jsonschema
        import referencing.jsonschema
    except ImportError:
        raise UserError(name, "it needs jsonschema", "pip install 'meshlora[rl]'") from None
    schema = read_json(Path(one.schema)) if isinstance(one.schema, str) else one.schema
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
        specification = referencing.jsonschema.specification_with(kind.META_SCHEMA["$schema"])
        known = referencing.Registry().with_resource(
            kind.META_SCHEMA["$schema"], specification.create_resource(kind.META_SCHEMA)
        )
        _check_references(specification.create_resource(schema), known, f"{name}: schema")
        validator = kind(schema, registry=referencing.Registry())  # which fetches nothing
        simple: tuple[Any, ...] = (None, True, 0, "", [], {})
        for value in simple:  # a schema that refers to itself alone never ends
            validator.is_valid(value)
    except jsonschema.SchemaError as error:
        raise UserError(f"{name}: schema", f"it is no JSON schema ({error.message})") from None
    except RecursionError:
        raise UserError(f"{name}: schema", "it is nested too deeply, or refers to itself without an end") from None

    def score(completion: Completion) -> float:
        try:
            value = parse_json(completion.text.strip())  # strict: bounded, no key twice
        except ValueError:
            return 0.0
        with _judged("the schema"):
            return float(validator.is_valid(value))

    return _each(name, score, on_failure=one.on_failure)


def _check_references(schema: Any, known: Any, where: str) -> None:
    """Look up what each part of `schema` refers to, in itself and `known`. Raises: UserError: it is missing."""
    from referencing.exceptions import Unresolvable

    left = [(schema, known.resolver_with_root(schema))]
    while left:
        part, resolver = left.pop()
        for word in ("$ref", "$dynamicRef"):
            if isinstance(part.contents, Mapping) and isinstance(to := part.contents.get(word), str):
                try:
                    resolver.lookup(to)
                except Unresolvable:
                    rule = f"there is nothing at {word} {to!r}, and nothing is fetched"
                    raise UserError(where, rule, "put it into the schema, under $defs") from None
        left += [(each, resolver.in_subresource(each)) for each in part.subresources()]


def _match(one: MatchReward, name: str) -> Score:
    def score(completion: Completion) -> float:
        said = completion.text.strip() if one.how == "text" else _last_number(completion.text)
        return float(said == _wanted(one, completion))

    return _each(name, score)


def _wanted(one: MatchReward, completion: Completion) -> str | tuple[str, str, int]:
    """What the completion is compared with. Raises: UserError: its prompt has no such answer."""
    answer = _field(completion, one.field)
    if one.how == "text":
        return answer.strip()
    if (number := _last_number(answer)) is None:
        raise UserError(f"{one.field}={answer[:60]!r}", "it has no number")
    return number


def _field(completion: Completion, field: str) -> str:
    if field not in completion.fields:
        known = ", ".join(sorted(completion.fields)) or "none"
        raise UserError(f"the prompt's record has no {field!r}", "the reward compares with it", f"it has {known}")
    value = completion.fields[field]
    return value if isinstance(value, str) else json.dumps(value)


def _last_number(text: str) -> tuple[str, str, int] | None:
    """(sign, digits without zeros around them, exponent) of the last number: exact, and as many digits as there are."""
    *_, last = (None, *_NUMBER.finditer(text))
    if last is None:
        return None
    sign, whole, after, exponent = (part or "" for part in last.groups())
    digits = whole.replace(",", "") + after
    if not digits.strip("0"):
        return "", "", 0
    if len(exponent) > _EXPONENT_DIGITS:
        return None
    power = int(exponent or "0") - len(after) + len(digits) - len(digits.rstrip("0"))
    return sign.strip("+"), digits.strip("0"), power


def _tests(one: UnitTestsReward, name: str) -> Score:
    try:
        (how,) = run_tests(["pass"], one)
    except UserError as error:
        raise UserError(f"{name}: {error.given}", error.rule, error.way_out) from None
    except MeshloraError as error:
        raise UserError(name, f"{error}", WAY_OUT) from None
    if how != "passed":
        rule = f"an empty program does not pass here: it {how}"
        raise UserError(name, rule, "raise its limits, and look whether other users may read this Python")

    def of_all(completions: Sequence[Completion]) -> list[float]:
        tests = list(map(str, _each(name, lambda each: _field(each, one.field))(completions)))
        programs = [each.prompt * one.with_prompt + code_in(each.text) for each in completions]
        return [float(how == "passed") for how in run_tests(programs, one, tests)]

    return of_all


def _function(one: FunctionReward, name: str) -> Score:
    call = load_function("rl.rewards.name", one.name)
    try:
        takes = inspect.signature(call).parameters
    except ValueError as error:  # of some that are written in C
        raise UserError(f"rl.rewards.name={one.name}", reason(error), "give a function of Python") from None

    def score(completion: Completion) -> Any:
        if "completions" not in takes:
            given = {"prompt": completion.prompt, "completion": completion.text}
            return call(**_taken({**completion.fields, **given}, takes))
        # As TRL has it; of one at a time, to name the one that it fails on.
        given = {**completion.fields, "prompts": completion.prompt, "completions": completion.text}
        (value,) = call(**_taken({key: [each] for key, each in given.items()}, takes))
        return value

    return _each(name, score)


def _taken(given: Mapping[str, Any], takes: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Those of `given` that a function takes."""
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values()):
        return dict(given)
    return {key: value for key, value in given.items() if key in takes}


def _model(one: ModelReward, name: str) -> Score:
    model = RewardModel(one.path, batch_size=one.batch_size)  # loaded once

    def of_all(completions: Sequence[Completion]) -> list[float]:
        try:
            return model([(each.prompt, each.text) for each in completions])
        except UserError as error:
            long = max(completions, key=lambda each: len(each.prompt + each.text))
            raise UserError(_of(name, long), f"{error.given}: {error.rule}", error.way_out) from None

    return of_all


_MAKERS: Mapping[type, Callable[[Any, str], Score]] = {
    RegexReward: _regex,
    JsonSchemaReward: _json_schema,
    MatchReward: _match,
    UnitTestsReward: _tests,
    FunctionReward: _function,
    ModelReward: _model,
}
# What is wrong with a prompt's record for a reward, found before anything is generated.
_NEEDS: Mapping[type, Callable[[Any, Completion], object]] = {
    MatchReward: _wanted,
    UnitTestsReward: lambda one, completion: _field(completion, one.field),
}
