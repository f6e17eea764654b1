"""A run file: one YAML -> one tree of dataclasses, every value checked where it stands.

Owns: names, types, defaults and the rules between fields that need no file and no model.
Does not own: whether model, data and topology fit together (`train.prepare`).
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from meshlora.errors import UserError, did_you_mean
from meshlora.plan.topology import Topology


@dataclass(frozen=True)
class ModelConfig:
    """The base model. See `meshlora.load` for what each field does."""

    path: str
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    disable_dropout: bool = False
    allow_unused_weights: bool = False


@dataclass(frozen=True)
class DataConfig:
    """The text. Files are JSONL, `context||completion` text, CSV, parquet, or a saved `datasets` folder.

    Attributes:
        train, eval: a path or a list of paths. columns: our field names -> theirs.
        max_length: tokens a sequence is cut to. loss_on: which tokens are trained.
        cache_dir: where token files are kept.
    """

    train: str | list[str]
    eval: str | list[str] | None = None
    columns: dict[str, str] | None = None
    max_length: int = 1024
    loss_on: Literal["completion", "all"] = "completion"
    cache_dir: str = "~/.cache/meshlora/tokens"


@dataclass(frozen=True)
class TrainConfig:
    """The loop. All sizes are in sequences and global: they do not change with the topology.

    Attributes:
        output: folder for the adapter, its checkpoints and `metrics.jsonl`; overwrite: it may hold a run already.
        steps: optimizer steps; epochs: or passes over the data. Exactly one is given.
        batch_size: sequences per optimizer step, over all ranks; micro_batch_size: at once on one dp rank.
        lr: peak learning rate. schedule: how it goes on after a linear warm-up over warmup_steps, by optimizer step
            (`train.schedule`): linear or cosine to min_lr, constant, inverse_sqrt, warmup_stable_decay (constant, and
            linear to min_lr in the last decay_steps), or cycle: straight lines through the points `{step: rate}` of
            cycle, without lr and warm-up.
        max_grad_norm: of the global gradient; 0 turns clipping off.
        label_smoothing: share of the loss that goes to all tokens of the vocabulary alike; not in evaluations.
        router_aux_loss_coef: how much the load-balancing loss of routers weighs; 0: it is not computed.
        routing_record: folder to write the experts that every token of every step went to; routing_replay: folder of
            such a record, whose experts are taken instead of the routers' own.
        lora_plus_ratio: LoRA+: the learning rate of B over that of A; None: the same for both.
        lora_plus_embedding_lr: LoRA+: the peak learning rate of factors on the embedding.
        eval_every, save_every: in optimizer steps; 0: only at the end. log_every: of the printed lines.
        replica_check_every: steps between comparisons of the copies of each factor, which are compared before every
            save too; 0: never.
    """

    output: str
    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 16
    micro_batch_size: int = 4
    lr: float = 2e-4
    schedule: Literal["linear", "cosine", "constant", "inverse_sqrt", "warmup_stable_decay", "cycle"] = "linear"
    warmup_steps: int = 0
    min_lr: float = 0.0
    decay_steps: int = 0
    cycle: dict[int, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    label_smoothing: float = 0.0
    router_aux_loss_coef: float = 0.0
    routing_record: str | None = None
    routing_replay: str | None = None
    lora_plus_ratio: float | None = None
    lora_plus_embedding_lr: float = 1e-6
    seed: int = 0
    eval_every: int = 0
    save_every: int = 0
    log_every: int = 10
    replica_check_every: int = 100
    overwrite: bool = False

    def __post_init__(self) -> None:
        _require(bool(self.output.strip()), "train.output", repr(self.output), "the name of a folder")
        _require(self.seed < 2**63, "train.seed", self.seed, "below 2**63")
        _require(self.lr > 0, "train.lr", self.lr, "above 0")
        for name in ("batch_size", "micro_batch_size", "log_every"):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        counts = ("warmup_steps", "min_lr", "decay_steps", "seed", "eval_every", "save_every", "replica_check_every")
        for name in (*counts, "weight_decay", "max_grad_norm", "router_aux_loss_coef"):
            _require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "not negative")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"train.{name}", getattr(self, name), "in [0, 1)")
        _require(self.eps > 0, "train.eps", self.eps, "above 0")
        self._check_schedule()
        _require(0 <= self.label_smoothing < 1, "train.label_smoothing", self.label_smoothing, "in [0, 1)")
        _require(
            self.lora_plus_embedding_lr > 0, "train.lora_plus_embedding_lr", self.lora_plus_embedding_lr, "above 0"
        )
        if self.lora_plus_ratio is not None:
            _require(self.lora_plus_ratio > 0, "train.lora_plus_ratio", self.lora_plus_ratio, "above 0")
        elif self.lora_plus_embedding_lr != 1e-6:
            raise UserError("train.lora_plus_embedding_lr", "it has no effect without lora_plus_ratio", "give both")
        if self.routing_record is not None and self.routing_replay is not None:
            raise UserError(
                "both train.routing_record and train.routing_replay", "what is replayed is recorded already", "give one"
            )
        if (self.steps is None) == (self.epochs is None):
            given = "neither" if self.steps is None else "both"
            raise UserError(f"{given} of train.steps and train.epochs", "a run has exactly one length", "give one")
        if self.steps is not None:
            _require(self.steps >= 1, "train.steps", self.steps, "at least 1")
        if self.epochs is not None:
            _require(self.epochs > 0, "train.epochs", self.epochs, "above 0")

    @property
    def peak_lr(self) -> float:
        """The highest rate of the schedule."""
        return max(self.cycle.values()) if self.schedule == "cycle" else self.lr

    def _check_schedule(self) -> None:
        """What only one schedule reads is given where that is the schedule."""
        ends = ("linear", "cosine", "warmup_stable_decay")
        readers = {"min_lr": ends, "decay_steps": ends[2:], "cycle": ("cycle",)}
        for name, schedules in readers.items():
            if getattr(self, name) and self.schedule not in schedules:
                raise UserError(
                    f"train.{name}",
                    f"it has no effect with train.schedule={self.schedule}",
                    f"it goes with {' or '.join(schedules)}",
                )
        _require(self.min_lr <= self.lr, "train.min_lr", self.min_lr, f"at most train.lr={self.lr}")
        if self.schedule == "warmup_stable_decay":
            _require(self.decay_steps >= 1, "train.decay_steps", self.decay_steps, "at least 1 with this schedule")
        if self.schedule == "cycle":
            _require(len(self.cycle) >= 2, "train.cycle", self.cycle, "two points or more, {step: rate, step: rate}")
            _require(min(self.cycle) >= 0, "train.cycle", self.cycle, "of steps from 0")
            _require(min(self.cycle.values()) >= 0, "train.cycle", self.cycle, "of rates that are not negative")
            _require(max(self.cycle.values()) > 0, "train.cycle", self.cycle, "of rates of which one is above 0")
            _require(not self.warmup_steps, "train.warmup_steps", self.warmup_steps, "0 with train.schedule=cycle")


@dataclass(frozen=True)
class RunConfig:
    """A whole run.

    Attributes:
        lora: fields of `peft.LoraConfig`; adapter: or the folder of an adapter to go on from.
        topology: as in `dp=2,tp=2,sp`; a missing dp is what the number of processes leaves.
        device: where ranks compute.
    """

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    lora: dict[str, Any] | None = None
    adapter: str | None = None
    topology: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        if (self.lora is None) == (self.adapter is None):
            given = "neither" if self.lora is None else "both"
            raise UserError(
                f"{given} of lora and adapter", "a run starts from one of them", "give lora: {r: 16, ...}, or adapter:"
            )
        if self.train.eval_every and self.data.eval is None:
            raise UserError(
                f"train.eval_every={self.train.eval_every}", "it has no effect without data.eval", "give data.eval"
            )
        Topology.parse(self.topology)


class _Loader(yaml.SafeLoader):
    """YAML, but a key that is given twice is an error rather than won by the second."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.value in lines:
                raise yaml.YAMLError(
                    f"{key.value} is given twice, in lines {lines[key.value]} and {key.start_mark.line + 1}"
                )
            lines[str(key.value)] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def read_run(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run file and apply `--set key.path=value` overrides.

    Raises:
        UserError: not readable, not YAML, unknown key (with the nearest name), wrong type, or a rule broken.
    """
    file = Path(path)
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        near = did_you_mean(file.name, [p.name for p in file.parent.glob("*.y*ml")]) if file.parent.is_dir() else ""
        raise UserError(f"{file}", "there is no such run file", near.removesuffix("known: ")) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file}", f"it is not readable YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file}", "a run file is a mapping with model:, data:, train: and lora:")
    for override in overrides or []:
        _apply(tree, override)
    config = _build(RunConfig, tree, "")
    assert isinstance(config, RunConfig)
    return config


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set `a.b=value` in the tree; the value is YAML."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UserError(f"--set {override}", "it must read key.path=value, as in --set train.lr=1e-4")
    *parents, last = path.split(".")
    for key in parents:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise UserError(f"--set {override}", f"{key} is a value, not a group of keys")
    try:
        tree[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"--set {override}", f"{text!r} is not a YAML value", "put it in quotes") from None


def _build(cls: type, tree: Any, path: str) -> Any:
    """An instance of the dataclass `cls` from plain values."""
    if not isinstance(tree, Mapping):
        raise UserError(f"{path or 'the run file'}: {tree!r}", f"it must be a group of keys: {_keys(cls)}")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in hints:
            raise UserError(f"{where}", "unknown key", did_you_mean(str(key), hints))
        values[key] = _convert(value, hints[key], where)
    for item in dataclasses.fields(cls):
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and item.name not in values:
            raise UserError(f"{path + '.' if path else ''}{item.name}", "this key is required")
    return cls(**values)


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type that the field declares."""
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(hint, value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise UserError(f"{where}: {value!r}", f"one of {', '.join(map(repr, arguments))}", _near(value, arguments))
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        for option in (a for a in arguments if a is not type(None)):
            if _is(value, option):
                return _convert(value, option, where)
        raise UserError(f"{where}: {value!r}", f"it must be {_words(hint)}")
    if hint is float and isinstance(value, str):
        value = _as_number(value)  # YAML 1.1 reads 1e-4 as text
    if not _is(value, hint):
        raise UserError(f"{where}: {value!r}", f"it must be {_words(hint)}")
    if hint is float and not abs(value) <= sys.float_info.max:  # nor NaN, nor a whole number beyond all floats
        raise UserError(f"{where}: {value!r}", "it must be a finite number")
    if origin is dict and arguments[1] is not Any:
        return {key: _convert(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    return float(value) if hint is float else value


def _is(value: Any, hint: Any) -> bool:
    if hint is float:
        return isinstance(_as_number(value), int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and bool(value) and all(_is(v, typing.get_args(hint)[0]) for v in value)
    if typing.get_origin(hint) is dict:
        key, item = typing.get_args(hint)
        return isinstance(value, dict) and all(_is(k, key) and (item is Any or _is(v, item)) for k, v in value.items())
    return isinstance(value, hint)


def _as_number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _words(hint: Any) -> str:
    words = {float: "a number", int: "a whole number", str: "text", bool: "true or false", type(None): "nothing"}
    if hint in words:
        return words[hint]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_words(a) for a in typing.get_args(hint) if a is not type(None))
    return "a list of text" if typing.get_origin(hint) is list else "a group of keys"


def _near(value: Any, options: tuple[Any, ...]) -> str:
    return did_you_mean(str(value), map(str, options)) if isinstance(value, str) else ""


def _keys(cls: type) -> str:
    return ", ".join(item.name for item in dataclasses.fields(cls))


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise UserError(f"{name}={value}", f"it must be {rule}")
