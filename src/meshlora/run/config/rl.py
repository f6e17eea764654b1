"""The group `rl` of a run file: how rollouts are made, and what a completion is worth.

Owns: names, types, defaults, and rules that need no file. Does not own: making rollouts (`meshlora_extra.rl`), what is
learnt from them (`meshlora_ground.objective`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import pydantic

from meshlora_ground.errors import UserError
from meshlora_ground.numbers import check_numbers, number, require
from meshlora_ground.reading import check_path
from meshlora_ground.user_code import file_of, is_function


@dataclass(frozen=True, kw_only=True)
class _Reward:
    """weight: of this reward in the sum."""

    kind: str
    weight: float = number(1.0, most=1e6)

    def __post_init__(self) -> None:
        check_numbers("rl.rewards", self)
        require(self.weight != 0, "rl.rewards.weight", self.weight, "another number than 0")


@dataclass(frozen=True, kw_only=True)
class _Judged(_Reward):
    """on_failure: of a completion that cannot be judged, as in time: stop: it ends the run; zero: its value is 0."""

    on_failure: Literal["stop", "zero"] = "stop"


@dataclass(frozen=True, kw_only=True)
class RegexReward(_Judged):
    """1 if a pattern is found in the completion.

    pattern: a regular expression. whole: it is to be the whole completion.
    """

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
class JsonSchemaReward(_Judged):
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
    """1 if the tests of the prompt's record, Python code, end well with the completion's code.

    field: of the record. cpu_s, wall_s, memory_mb: limits. with_prompt: the prompt is code, too, and goes before.
    sandbox: bubblewrap: the code runs in namespaces of its own (`rl.sandbox`); none: as the user (`rl.contained`).
    """

    kind: Literal["tests"] = "tests"
    field: str = "tests"
    cpu_s: int = number(5, "at least 1", most=86_400)
    wall_s: float = number(10.0, "above 0", most=86_400)
    memory_mb: int = number(1024, "at least 1", most=10**7)
    with_prompt: bool = False
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"


@dataclass(frozen=True, kw_only=True)
class FunctionReward(_Reward):
    """What a Python function of the user's says. name: `package.module:function`, or `path/to/file.py:function`."""

    kind: Literal["function"] = "function"
    name: str

    def __post_init__(self) -> None:
        super().__post_init__()
        require(is_function(self.name), "rl.rewards.name", self.name, "as in module:function")


@dataclass(frozen=True, kw_only=True)
class ModelReward(_Reward):
    """The output of a classification model with one label. path: its folder, or that of an adapter which makes a base
    one, or of the run that trained it. batch_size: texts at once.
    """

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


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """How the rollouts of a run are made. Prompts are `data.train`; a step has `train.batch_size` completions.

    Attributes:
        rewards: what a completion is worth: their weighted sum. None where a teacher says it.
        completions: of each prompt of a step, a group.
        on_policy: the share of steps whose completions are generated, of a run with a teacher; in the others they are
            those of the data.
        max_new_tokens: maximum tokens of a completion. temperature: divides the logits. stop: texts that end a
            completion. batch_size: completions at once, on each replica.
        source: own: the model generates, on the mesh that trains it; a URL: of an engine that serves the adapter
            (`rl.engine`); or a folder of recorded rollouts (`reading.stream`).
        updates: optimizer steps on the rollouts of one generation.
        publish_to: folder that gets the adapter in the layout of engines (`rl.publishing`); of an engine, which reads
            it there, default: published in the output. publish_every: in optimizer steps.
        adapter_name: of the adapter in the engine.
    """

    rewards: list[Reward] = field(default_factory=list)
    completions: int = number(8, "at least 1", most=10**4)
    max_new_tokens: int = number(64, "at least 1", most=10**8)
    temperature: float = number(1.0, "above 0", most=1e6)
    stop: list[str] = field(default_factory=list)
    batch_size: int = number(16, "at least 1", most=10**6)
    source: str = "own"
    updates: int = number(1, "at least 1", most=1000)
    on_policy: float = number(1.0, "in [0, 1]")
    publish_to: str | None = None
    publish_every: int = number(1, "at least 1", most=10**9)
    adapter_name: str = "meshlora"

    def __post_init__(self) -> None:
        check_numbers("rl", self)
        require(all(self.stop), "rl.stop", self.stop, "of texts that are not empty")
        check_path("rl.publish_to", self.publish_to)
        require(bool(self.adapter_name.strip()), "rl.adapter_name", repr(self.adapter_name), "a name")
        if self.is_folder:
            check_path("rl.source", self.source)
        if self.is_engine:
            _check_address(self.source)
        if self.publish_every > 1 and self.publish_to is None and not self.is_engine:
            raise UserError("rl.publish_every", "it has no effect without rl.publish_to", "give both")
        if self.adapter_name != "meshlora" and not self.is_engine:
            rule = "it is the adapter's name in an engine, and rl.source is none"
            raise UserError(f"rl.adapter_name={self.adapter_name}", rule, "leave it out")

    @property
    def files(self) -> list[str]:
        """Files and folders that decide of the rewards."""
        found = []
        for one in self.rewards:
            if isinstance(one, FunctionReward) and (file := file_of(one.name)) is not None:
                found.append(str(file))
            elif isinstance(one, ModelReward):
                found.append(one.path)
            elif isinstance(one, JsonSchemaReward) and isinstance(one.schema, str):
                found.append(one.schema)
        return found

    @property
    def may_fail(self) -> bool:
        """Whether a reward counts what it cannot judge as 0."""
        return any(isinstance(one, _Judged) and one.on_failure == "zero" for one in self.rewards)

    @property
    def is_own(self) -> bool:
        """Whether the model that is trained generates."""
        return self.source == "own"

    @property
    def is_folder(self) -> bool:
        """Whether the rollouts are recorded."""
        return not self.is_own and not self.is_engine

    @property
    def is_engine(self) -> bool:
        """Whether an engine generates."""
        return self.source.startswith(("http://", "https://"))


def _check_address(url: str) -> None:
    """Refuse an address that says nobody where the engine is, or whoever reads the run's files a password."""
    try:
        parts = urlsplit(url)
        has_host, has_secret = bool(parts.hostname) and parts.port != 0, "@" in parts.netloc
    except ValueError:
        has_host, has_secret = False, "@" in url
    if has_secret:
        rule = "a name or password in it would be written to logs and checkpoints"
        raise UserError("rl.source", rule, "give the address alone, as in http://127.0.0.1:8000")
    require(has_host, "rl.source", url, "an address, as in http://127.0.0.1:8000")
