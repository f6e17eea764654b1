"""Targets: which linears an adapter sits on, and with which rank and scale.

Owns: reading `peft.LoraConfig` as PEFT does, refusing what is not supported by name.
Does not own: drawing the factors (`adapter.initialization`), the file format (`adapter.peft_format`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.other import get_pattern_key

from meshlora.errors import UnsupportedError, UserError, did_you_mean
from meshlora.plan.rules import ModelPlan

_SUPPORTED = {
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
}
# These describe where an adapter comes from, or how PEFT runs it; they do not change what is trained.
_DESCRIPTIVE = {
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "runtime_config",
}
_INITS = (True, False, "gaussian")


@dataclass(frozen=True)
class Target:
    """LoRA on one linear: rank r and scale s of `s * B @ A`."""

    name: str
    r: int
    scaling: float


def check_supported(config: LoraConfig) -> None:
    """Refuse every option that is set and that meshlora would not follow.

    Raises:
        UnsupportedError: names the option. UserError: a value out of range.
    """
    default = LoraConfig()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in _SUPPORTED | _DESCRIPTIVE or value == getattr(default, field.name):
            continue
        if not value and not getattr(default, field.name):  # None, [], {} and False all say "off"
            continue
        raise UnsupportedError(
            f"LoraConfig({field.name}={value!r})",
            "this option is not supported yet",
            f"leave it at {getattr(default, field.name)!r}; supported: {', '.join(sorted(_SUPPORTED))}",
        )
    if str(getattr(config.task_type, "value", config.task_type) or "CAUSAL_LM") != "CAUSAL_LM":
        raise UnsupportedError(f"LoraConfig(task_type={config.task_type!r})", "only CAUSAL_LM is supported")
    if not any(config.init_lora_weights is known or config.init_lora_weights == known for known in _INITS):
        raise UnsupportedError(
            f"LoraConfig(init_lora_weights={config.init_lora_weights!r})", f"supported: {', '.join(map(repr, _INITS))}"
        )
    _check_types(config)
    for what, rank in [("r", config.r), *((f"rank_pattern[{k!r}]", v) for k, v in (config.rank_pattern or {}).items())]:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise UserError(f"LoraConfig({what}={rank!r})", "a rank is a whole number of at least 1")
    alphas = [("lora_alpha", config.lora_alpha)]
    alphas += [(f"alpha_pattern[{k!r}]", v) for k, v in (config.alpha_pattern or {}).items()]
    for what, alpha in alphas:
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not alpha > 0 or math.isinf(alpha):
            raise UserError(f"LoraConfig({what}={alpha!r})", "lora_alpha is a number above 0", "2 * r is usual")


def _check_types(config: LoraConfig) -> None:
    """PEFT takes values of any type here, and fails far away or reads them as something else."""
    layers = config.layers_to_transform
    if layers is not None and not all(
        type(i) is int for i in (layers if isinstance(layers, list | tuple) else [layers])
    ):
        raise UserError(f"LoraConfig(layers_to_transform={layers!r})", "it is a whole number or a list of them")
    if not isinstance(config.use_rslora, bool):
        raise UserError(f"LoraConfig(use_rslora={config.use_rslora!r})", "it is true or false")
    for option in ("rank_pattern", "alpha_pattern"):
        value = getattr(config, option) or {}
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise UserError(f"LoraConfig({option}={value!r})", "it maps patterns to numbers, as in {q_proj: 8}")
        for pattern in value:
            _check_regular_expression(option, pattern)
    for option in ("target_modules", "exclude_modules"):
        value = getattr(config, option) or ()
        if isinstance(value, str):
            _check_regular_expression(option, value)
        elif not isinstance(value, Collection) or not all(isinstance(name, str) for name in value):
            raise UserError(f"LoraConfig({option}={value!r})", "it is a list of names or one regular expression")


def _check_regular_expression(option: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"LoraConfig({option}={pattern!r})", f"it is not a regular expression ({error})") from error


def resolve_targets(model: Any, plan: ModelPlan, config: LoraConfig, *, strict: bool = True) -> dict[str, Target]:
    """Name -> target, in module order, as PEFT would choose them.

    Args:
        model: the Hugging Face model; only its module names are read.
        strict: every pattern must match something. Off for adapters that come from a file, whose keys are checked.

    Raises:
        UserError: nothing matches, or (strict) one pattern matches nothing; names the nearest module.
        UnsupportedError: a match that is not a linear, or the output head.
    """
    check_supported(config)
    head = _head_name(model)
    config = dataclasses.replace(config, target_modules=_explicit_targets(model, plan, config, head))
    matched = [name for name, _ in model.named_modules() if name and check_target_module_exists(config, name) is True]
    matched += [
        name
        for name, _ in model.named_modules()
        if name and isinstance(check_target_module_exists(config, name), re.Match)
    ]
    for name in matched:
        if name not in plan.linears or name == head:
            kind = "the output head" if name == head else type(model.get_submodule(name)).__name__
            raise UnsupportedError(
                f"target_modules matches {name}", f"LoRA on {kind} is not supported yet", "target linear layers inside"
            )
    if strict:
        _check_each_pattern(plan, config, matched)
    if not matched:
        raise UserError(
            f"target_modules={_shown(config.target_modules)}",
            "it matches no linear layer of the model"
            + (" in the layers of layers_to_transform" if config.layers_to_transform is not None else "")
            + (" that exclude_modules leaves" if config.exclude_modules else ""),
            _way_to_a_match(config, plan),
        )
    return {name: _target(name, config) for name in plan.linears if name in set(matched)}


def num_trainable(targets: Mapping[str, Target], plan: ModelPlan) -> int:
    """Trainable elements of an adapter, each logical element counted once."""
    rules = [(target.r, plan.linears[name]) for name, target in targets.items()]
    return sum(r * (rule.in_features + rule.out_features) for r, rule in rules)


def final_config(config: LoraConfig, targets: Mapping[str, Target], plan: ModelPlan) -> LoraConfig:
    """The configuration to store: a copy whose `target_modules` names what is trained (`"all-linear"` resolved)."""
    config = dataclasses.replace(config)
    if config.target_modules is None or config.target_modules == "all-linear":
        suffixes = {name.rpartition(".")[2] for name in targets}
        covered = {name for name in plan.linears if name.rpartition(".")[2] in suffixes}
        config.target_modules = suffixes if covered == set(targets) else set(targets)
    return config


def _target(name: str, config: LoraConfig) -> Target:
    r = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), name), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), name), config.lora_alpha)
    return Target(name, r, alpha / math.sqrt(r) if config.use_rslora else alpha / r)


def _head_name(model: Any) -> str | None:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def _explicit_targets(model: Any, plan: ModelPlan, config: LoraConfig, head: str | None) -> set[str] | str:
    """`target_modules` with its shorthands spelled out."""
    given = config.target_modules
    if given == "all-linear":
        return {name for name in plan.linears if name != head}
    if given is None:
        known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model.config.model_type)
        if known is None:
            raise UserError(
                "LoraConfig(target_modules=None)",
                f"PEFT has no default targets for model_type {model.config.model_type!r}",
                'name them, or use "all-linear"',
            )
        return set(known)
    return given if isinstance(given, str) else set(given)


def _check_each_pattern(plan: ModelPlan, config: LoraConfig, matched: list[str]) -> None:
    """Every suffix, rank pattern and alpha pattern matches at least one linear; every layer index exists."""
    indices = config.layers_to_transform
    for index in [indices] if isinstance(indices, int) else indices or []:
        if not 0 <= index < plan.num_layers:
            raise UserError(
                f"layers_to_transform={indices}", f"the model has {plan.num_layers} layers, 0 to {plan.num_layers - 1}"
            )
    for option in ("target_modules", "exclude_modules"):
        given = getattr(config, option) or ()
        for suffix in [] if isinstance(given, str) else sorted(given):
            if not any(name == suffix or name.endswith(f".{suffix}") for name in plan.linears):
                raise UserError(
                    f"{option}={_shown(given)}",
                    f"{suffix!r} matches no linear layer",
                    did_you_mean(suffix, _suffixes(plan.linears)),
                )
    excluded = config.exclude_modules
    if isinstance(excluded, str) and not any(re.fullmatch(excluded, name) for name in plan.linears):
        raise UserError(
            f"exclude_modules={excluded!r}", "it matches no linear layer", "a text is a pattern for whole names"
        )
    for option in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, option) or {}:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in matched):
                raise UserError(
                    f"{option}={getattr(config, option)}",
                    f"{pattern!r} matches none of the targets",
                    did_you_mean(pattern, _suffixes(matched)),
                )


def _suffixes(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def _way_to_a_match(config: LoraConfig, plan: ModelPlan) -> str:
    given = config.target_modules
    if config.exclude_modules:
        return "exclude less"
    if isinstance(given, str):
        return f"a text is a pattern for whole names: give a list, as in [{given}], or '.*{given}'"
    return did_you_mean(next(iter(sorted(given or {""}))), _suffixes(plan.linears))


def _shown(targets: Any) -> str:
    return repr(targets) if isinstance(targets, str) or targets is None else str(sorted(targets))
