"""What completions are worth: the weighted sum of a run's rewards, each computed once.

Owns: the built-in rewards, calling a user's function, naming the completion that a reward fails on. Does not own: their
options (`config.rl`), running tests (`rl.unit_tests`), a reward model (`rl.reward_model`).

    rewards = Rewards([RegexReward(pattern="yes"), FunctionReward(name="rewards.py:shortness", weight=0.1)])
    scored = rewards([Completion("Is it?", "yes, it is", {}, "prompts.jsonl:1")])    # [Scored(total=1.0 + ..., ...)]

Only the rank that writes the rollouts calls this; the others read what it wrote.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshlora.common.errors import UserError, reason
from meshlora.common.files import read_json
from meshlora.common.limits import OutOfTimeError, time_limit
from meshlora.common.reading import parse_json
from meshlora.config.rl import (
    FunctionReward,
    JsonSchemaReward,
    MatchReward,
    ModelReward,
    RegexReward,
    UnitTestsReward,
)
from meshlora.rl.reward_model import RewardModel
from meshlora.rl.unit_tests import code_in, run_tests

_PATTERN_S = 2.0  # for one completion: a pattern may take exponential time
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Completion:
    """What a model said. prompt: as text. fields: of the prompt's record. origin: where that stands."""

    prompt: str
    text: str
    fields: Mapping[str, Any]
    origin: str


@dataclass(frozen=True)
class Scored:
    """total: the weighted sum. parts: the value of each reward, by name, without its weight."""

    total: float
    parts: Mapping[str, float]


Score = Callable[[Sequence[Completion]], Sequence[float]]


class Rewards:
    """The rewards of a run, ready to be computed.

    Raises:
        UserError: one that could not be: no such function or file, a schema that is none, no room for tests.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self._scores: dict[str, tuple[float, Score]] = {}
        for number, one in enumerate(given):
            name = _name_of(one)
            name = f"{name} {number + 1}" if name in self._scores else name
            self._scores[name] = (one.weight, _MAKERS[type(one)](one, f"rl.rewards.{number} ({name})"))

    def __call__(self, completions: Sequence[Completion]) -> list[Scored]:
        """Raises: UserError: a reward failed on a completion, or gave no finite number; it is named."""
        values = {name: score(completions) for name, (_, score) in self._scores.items()}
        found = []
        for place, completion in enumerate(completions):
            parts = {name: _number(of_all[place], name, completion) for name, of_all in values.items()}
            total = math.fsum(self._scores[name][0] * value for name, value in parts.items())
            found.append(Scored(total, parts))
        return found


def _name_of(one: Any) -> str:
    return str(one.name) if isinstance(one, FunctionReward) else str(one.kind)


def _number(value: Any, name: str, completion: Completion) -> float:
    """`value`, if it is a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(_of(name, completion), f"it is {value!r}, no finite number")
    return number


def _of(name: str, completion: Completion) -> str:
    return f"reward {name} of the completion {completion.text[:120]!r} of {completion.origin}"


def _each(name: str, score: Callable[[Completion], Any]) -> Score:
    """One completion at a time. What `score` raises names the completion."""

    def of_all(completions: Sequence[Completion]) -> list[Any]:
        values = []
        for completion in completions:
            try:
                values.append(score(completion))
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
        try:
            with time_limit(_PATTERN_S):
                return float(search(completion.text) is not None)
        except OutOfTimeError:
            raise UserError(
                f"the pattern {one.pattern!r}", f"it took longer than {_PATTERN_S:g} s", "write a simpler one"
            ) from None

    return _each(name, score)


def _json_schema(one: JsonSchemaReward, name: str) -> Score:
    try:
        import jsonschema
        import referencing
    except ImportError:
        raise UserError(name, "it needs jsonschema", "pip install 'meshlora[rl]'") from None
    schema = read_json(Path(one.schema)) if isinstance(one.schema, str) else one.schema
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise UserError(f"{name}: schema", f"it is no JSON schema ({error.message})") from None
    validator = kind(schema, registry=referencing.Registry())  # which fetches nothing

    def score(completion: Completion) -> float:
        try:
            value = parse_json(completion.text.strip())
        except ValueError:
            return 0.0
        with time_limit(_PATTERN_S):
            return float(validator.is_valid(value))

    return _each(name, score)


def _match(one: MatchReward, name: str) -> Score:
    def score(completion: Completion) -> float:
        answer = _field(completion, one.field)
        if one.how == "text":
            return float(completion.text.strip() == answer.strip())
        wanted, said = _last_number(answer), _last_number(completion.text)
        if wanted is None:
            raise UserError(f"{one.field}={answer[:60]!r}", "it has no number")
        return float(said == wanted)

    return _each(name, score)


def _field(completion: Completion, field: str) -> str:
    if field not in completion.fields:
        known = ", ".join(sorted(completion.fields)) or "none"
        raise UserError(f"the prompt's record has no {field!r}", "the reward compares with it", f"it has {known}")
    value = completion.fields[field]
    return value if isinstance(value, str) else json.dumps(value)


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _tests(one: UnitTestsReward, name: str) -> Score:
    (how,) = run_tests(["pass"], one)
    if how != "passed":
        rule = f"an empty program does not pass here: it {how}"
        raise UserError(name, rule, "raise its limits, and look whether other users may read this Python")

    def of_all(completions: Sequence[Completion]) -> list[float]:
        tests = [str(each) for each in _each(name, lambda each: _field(each, one.field))(completions)]
        programs = [each.prompt * one.with_prompt + code_in(each.text) for each in completions]
        return [float(how == "passed") for how in run_tests(programs, one, tests)]

    return of_all


def _function(one: FunctionReward, name: str) -> Score:
    call = _loaded(one.name)
    try:
        takes = inspect.signature(call).parameters
    except ValueError as error:  # of some that are written in C
        raise UserError(f"rl.rewards.name={one.name}", reason(error), "give a function of Python") from None
    if "completions" in takes:  # as TRL has it; of one at a time, to name the one that it fails on

        def score(completion: Completion) -> Any:
            fields = {key: [value] for key, value in completion.fields.items()}
            given = {"prompts": [completion.prompt], "completions": [completion.text]}
            (value,) = call(**_taken(fields | given, takes))
            return value

    else:

        def score(completion: Completion) -> Any:
            given = {"prompt": completion.prompt, "completion": completion.text}
            return call(**_taken({**completion.fields, **given}, takes))

    return _each(name, score)


def _taken(given: Mapping[str, Any], takes: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Those of `given` that a function takes."""
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values()):
        return dict(given)
    return {key: value for key, value in given.items() if key in takes}


def _loaded(name: str) -> Callable[..., Any]:
    """The function of a `module:function` or a `file.py:function`. Runs the code of that module or file.

    Raises:
        UserError: there is none, or its code fails.
    """
    place, _, function = name.rpartition(":")
    given = f"rl.rewards.name={name}"
    try:
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise UserError(given, f"there is no file {place}")
            spec = importlib.util.spec_from_file_location(f"_reward_of_{Path(place).stem}", place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # where dataclasses of the file look for its names
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(given, f"{error}", f"install it, or name its file: path/to/{place}.py:{function}") from None
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise UserError(given, f"its code raised {type(error).__name__} ({reason(error)})") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(given, f"{place} has no function {function}")
    return found


def _model(one: ModelReward, name: str) -> Score:
    model = RewardModel(one.path, batch_size=one.batch_size)

    def of_all(completions: Sequence[Completion]) -> list[float]:
        texts = [each.prompt + each.text for each in completions]
        try:
            return model(texts)
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
