"""The group `rl` of a run file: how rollouts are made, and what a completion is worth.

Owns: names, types, defaults, and rules that need no file. Does not own: making rollouts (`meshlora.rl`), what is
learnt from them (`config.objective`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import pydantic

from meshlora.common.errors import UserError
from meshlora.common.reading import check_path
from meshlora.config.numbers import check_numbers, number, require

_FUNCTION = re.compile(r"[\w.]+:\w+|.+\.py:\w+")


@dataclass(frozen=True, kw_only=True)
class _Reward:
    """weight: of this reward in the sum."""

    kind: str
    weight: float = number(1.0, most=1e6)

    def __post_init__(self) -> None:
        check_numbers("rl.rewards", self)
        require(self.weight != 0, "rl.rewards.weight", self.weight, "another number than 0")


@dataclass(frozen=True, kw_only=True)
class RegexReward(_Reward):
    """1 if the pattern is found in the completion. whole: only if it is the whole completion."""

    kind: Literal["regex"] = "regex"
    pattern: str
    whole: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UserError(f"rl.rewards.pattern={self.pattern!r}", f"it is no regular expression ({error})") from None


@dataclass(frozen=True, kw_only=True)
class JsonSchemaReward(_Reward):
    """1 if the completion is JSON that the schema accepts. schema: itself, or a file."""

    kind: Literal["json_schema"] = "json_schema"
    schema: dict[str, Any] | str


@dataclass(frozen=True, kw_only=True)
class MatchReward(_Reward):
    """1 if the completion is the prompt's answer. field: of the prompt's record.

    how: text: both are the same without the spaces around them; number: their last numbers are.
    """

    kind: Literal["match"] = "match"
    field: str = "answer"
    how: Literal["text", "number"] = "text"


@dataclass(frozen=True, kw_only=True)
class UnitTestsReward(_Reward):
    """1 if the completion's code, with the tests after it, ends well in a process of its own.

    field: of the prompt's record, Python code. cpu_s, wall_s, memory_mb: limits. with_prompt: the prompt is code, too,
    and goes before.
    """

    kind: Literal["tests"] = "tests"
    field: str = "tests"
    cpu_s: int = number(5, "at least 1", most=86_400)
    wall_s: float = number(10.0, "above 0", most=86_400)
    memory_mb: int = number(1024, "at least 1", most=10**7)
    with_prompt: bool = False


@dataclass(frozen=True, kw_only=True)
class FunctionReward(_Reward):
    """What a Python function of the user's says. name: `package.module:function`, or `path/to/file.py:function`."""

    kind: Literal["function"] = "function"
    name: str

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(_FUNCTION.fullmatch(self.name)), "rl.rewards.name", self.name, "as in module:function")


@dataclass(frozen=True, kw_only=True)
class ModelReward(_Reward):
    """The output of a classification model with one label. path: its folder. batch_size: texts at once."""

    kind: Literal["model"] = "model"
    path: str
    batch_size: int = number(16, "at least 1", most=10**6)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path("rl.rewards.path", self.path)


Reward = Annotated[
    RegexReward | JsonSchemaReward | MatchReward | UnitTestsReward | FunctionReward | ModelReward,
    pydantic.Discriminator("kind"),
]
REWARDS: dict[str, type[Any]] = {kind.kind: kind for kind in get_args(get_args(Reward)[0])}
