"""Validation of adapter options: types, ranges, and patterns, matched as in PEFT and within a time limit.

Owns: refusing values that PEFT does not check, fails on much later or misreads; which options hold regular expressions,
and how PEFT wraps each; refusing patterns that are invalid, too slow on the names of a model, or match none. Does not
own: which names are targets, and which options are supported (`adapter.targets.resolve` for training,
`meshlora_extra.merging.changes` for merging).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from peft import LoraConfig, LoraRuntimeConfig, PeftType

from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import UserError, did_you_mean
from meshlora_ground.limits import OutOfTimeError, time_limit

# Far beyond the width of any matrix; and safe to multiply by in float32.
_LARGEST_RANK, _LARGEST_ALPHA = 2**16, 1e9
# Sane patterns take milliseconds for all names.
_SECONDS = 1.0
_OF_ENCODER = re.compile(r"\.decoder\.layers\.\d+\.(encoder|cross)_attn\.")
# PEFT's regular expression, {} being the option's text; the first two, unless lists of names, match in full.
_FORMS = {
    "target_modules": "{}",
    "exclude_modules": "{}",
    "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
    "rank_pattern": r"(.*\.)?({})$",
    "alpha_pattern": r"(.*\.)?({})$",
    "modules_to_save": r"(^|.*\.){}($|\..*)",
}


def _are_names(value: object, *, or_text: bool = False) -> bool:
    """A collection of names, None, or with `or_text` a single string."""
    if value is None or isinstance(value, str):
        return value is None or or_text
    return isinstance(value, list | tuple | set) and _is_each(value, str)


def _is_each(values: Iterable[object], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


_are_texts = functools.partial(_are_names, or_text=True)


def _are_indices(value: object) -> bool:
    if value is None or type(value) is int:  # by type: True is an int to isinstance
        return True
    return isinstance(value, list | tuple) and all(type(i) is int for i in value)


def _are_tokens(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(isinstance(each, list) and _are_tokens(each) for each in value.values())
    if not isinstance(value, list):
        return value is None
    return all(type(i) is int and i >= 0 for i in value) and 0 < len(value) == len(set(value))


# Option -> (whether a value is valid, the rule). In the order in which they are checked.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bias": (lambda value: value in ("none", "all", "lora_only"), "one of none, all, lora_only"),
    "layers_to_transform": (_are_indices, "it is a whole number or a list of them"),
    "trainable_token_indices": (_are_tokens, "it is a list of token ids, each once, or of each of several modules one"),
    "layers_pattern": (_are_texts, "it is a name or a list of names"),
    **dict.fromkeys(
        ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying"),
        (lambda value: isinstance(value, bool), "it is true or false"),
    ),
    "runtime_config": (lambda value: isinstance(value, LoraRuntimeConfig | dict), "it is a group of keys"),
    **dict.fromkeys(
        ("rank_pattern", "alpha_pattern"),
        (
            lambda value: isinstance(value, dict) and _is_each(value, str),
            "it maps patterns to numbers, as in {q_proj: 8}",
        ),
    ),
    **dict.fromkeys(("modules_to_save", "target_parameters"), (_are_names, "it is a list of names")),
    **dict.fromkeys(
        ("target_modules", "exclude_modules"), (_are_texts, "it is a list of names or one regular expression")
    ),
}


def check_kind(config: Any) -> None:
    """Check that `config` is one of LoRA, and of no method that extends it. Raises: UserError: names its type."""
    if isinstance(config, LoraConfig) and config.peft_type == PeftType.LORA:
        return
    way_out = "give a peft.LoraConfig"
    if isinstance(config, dict):
        way_out = "meshlora.lora_config makes one of a dict"
    raise UserError(f"an adapter by {type(config).__name__}", "adapters are those of peft.LoraConfig", way_out)


def check_values(config: LoraConfig) -> None:
    """Check types and ranges that PEFT does not check, fails on much later, or misreads.

    Raises:
        UserError: names the option.
    """
    for option, (is_right, rule) in _VALUES.items():
        if not is_right(value := getattr(config, option)):
            raise UserError(f"LoraConfig({option}={value!r})", rule)
    check_patterns(config)
    for what, rank in _numbers(config, "r", "rank_pattern"):
        if type(rank) is not int or not 1 <= rank <= _LARGEST_RANK:
            given = f"LoraConfig({what}={rank!r})"
            raise UserError(given, f"a rank is a whole number of at least 1, at most {_LARGEST_RANK}")
    dropout = config.lora_dropout
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        raise UserError(f"LoraConfig(lora_dropout={dropout!r})", "it is a share in [0, 1)", "0.05 to 0.1 is usual")
    for what, alpha in _numbers(config, "lora_alpha", "alpha_pattern"):
        # `not 0 < alpha`, so that NaN, which compares as False to anything, is refused.
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= _LARGEST_ALPHA:
            given = f"LoraConfig({what}={alpha!r})"
            raise UserError(given, f"lora_alpha is a number above 0, at most {_LARGEST_ALPHA:g}", "2 * r is usual")


def _numbers(config: LoraConfig, option: str, pattern: str) -> list[tuple[str, Any]]:
    """(name, value) of an option and of each entry of its pattern."""
    found = [(option, getattr(config, option))]
    for key, value in getattr(config, pattern).items():
        found.append((f"{pattern}[{key!r}]", value))
    return found


def check_patterns(config: LoraConfig, names: Iterable[str] = ()) -> None:
    """Match every pattern of `config`, whose options have valid types, against all `names`.

    Raises:
        UserError: one is not a regular expression, or together they take too long; names the current one.
    """
    names = [*names, *(config.target_parameters or ())]
    given = "LoraConfig"
    try:
        with time_limit(_SECONDS):
            for option, pattern in _patterns(config):
                given = f"LoraConfig({option}={pattern!r})"
                compiled = _compiled(_FORMS[option].replace("{}", pattern))
                match = compiled.match
                if _FORMS[option] == "{}":
                    match = compiled.fullmatch
                for name in names:  # for the time it takes: a pattern may backtrack for years
                    match(name)
    except RecursionError:
        raise UserError(given, "it is nested too deeply for a regular expression") from None
    except (re.error, OverflowError) as error:
        raise UserError(given, f"it is not a regular expression ({error})") from None
    except OutOfTimeError:
        rule = f"its patterns take more than {_SECONDS:.0f} s on the names of the model"
        raise UserError(given, rule, "use a simpler pattern, or a list of names") from None


def pattern_key(patterns: Iterable[str], name: str) -> str:
    """PEFT's `get_pattern_key`: the first of `patterns` that matches `name`, else `name` itself."""
    for pattern in patterns:
        if _compiled(_FORMS["rank_pattern"].replace("{}", pattern)).match(name):
            return pattern
    return name


def rank_and_scaling(config: LoraConfig, name: str) -> tuple[int, float]:
    """r, and s of `s * B @ A`, of the target that patterns match as `name`."""
    r = config.rank_pattern.get(pattern_key(config.rank_pattern, name), config.r)
    alpha = config.alpha_pattern.get(pattern_key(config.alpha_pattern, name), config.lora_alpha)
    if config.use_rslora:  # Kalajdzievski, 2023
        return r, alpha / math.sqrt(r)
    return r, alpha / r


def matches(ends: Collection[str], names: Iterable[str]) -> list[str]:
    """The `names` that equal one of `ends` or end with a dot and one of them."""
    whole, tails = {*ends}, tuple(f".{end}" for end in ends)
    return [name for name in names if name in whole or name.endswith(tails)]


def _patterns(config: LoraConfig) -> Iterator[tuple[str, str]]:
    """(option, pattern) of all patterns."""
    for option in _FORMS:
        value = getattr(config, option) or ()
        if option in ("target_modules", "exclude_modules"):
            if isinstance(value, str) and value != "all-linear":  # lists of these are names
                yield option, value
        elif isinstance(value, str):
            yield option, value
        else:
            for pattern in value:
                yield option, pattern


@functools.lru_cache(maxsize=2**16)  # `re` keeps 512, and an adapter may have a rank for each module
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def why_no_gradient(plan: ModelPlan, module: str) -> str | None:
    """Why no gradient reaches an adapter on `module`; None: one does, as far as is known before a step."""
    if ".indexer." in module:
        return "an indexer only chooses what attention sees, by top-k: no gradient reaches it"
    if not plan.encoder and _OF_ENCODER.search(module):
        return "it attends to the states of an encoder, and this decoder runs alone: no gradient reaches it"
    if plan.model_type == "jamba" and module.endswith(".dt_proj"):
        return "the model multiplies by its weight itself, past the adapter: no gradient reaches it"
    return None


def is_open(plan: ModelPlan, config: LoraConfig, module: str) -> bool:
    """Whether `config` may put an adapter on `module`: it is of the text part, named in full, or opened by `vision`."""
    vision, given = getattr(config, "vision", False), config.target_modules
    if plan.is_text(module) or (given is not None and not isinstance(given, str) and module in given):
        return True
    if isinstance(vision, bool):
        return vision
    return any(f".{name}." in f".{module}." for name in vision)


def check_each_pattern(plan: ModelPlan, config: LoraConfig, matched: list[str]) -> None:
    """Refuse suffixes, rank patterns and alpha patterns that match no linear, and layer indices out of range."""
    indices = config.layers_to_transform
    if isinstance(indices, int):
        indices = [indices]
    for index in indices or ():
        if not 0 <= index < plan.num_layers:
            rule = f"the model has {plan.num_layers} layers, 0 to {plan.num_layers - 1}"
            raise UserError(f"layers_to_transform={config.layers_to_transform}", rule)
    own = [*plan.linears, *plan.tables]
    _check_each_name("target_modules", config, [name for name in own if is_open(plan, config, name)], plan)
    # Experts and routers may be excluded, but are no targets by their modules' names.
    excludable, excluded = [*own, *plan.projections, *plan.matrices], config.exclude_modules
    _check_each_name("exclude_modules", config, excludable, plan)
    if isinstance(excluded, str) and not any(re.fullmatch(excluded, name) for name in excludable):
        rule = "it matches no linear layer"
        raise UserError(f"exclude_modules={excluded!r}", rule, "a text is a pattern for whole names")
    for option in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, option) or {}:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in matched):
                rule = f"{pattern!r} matches none of the targets"
                raise UserError(f"{option}={getattr(config, option)}", rule, did_you_mean(pattern, suffixes(matched)))


def _check_each_name(option: str, config: LoraConfig, names: list[str], plan: ModelPlan) -> None:
    """Refuse an entry of `option`, unless it is one pattern, that is about none of `names`, or only of what PEFT drops
    from the targets because it is trained in full."""
    given = getattr(config, option) or ()
    if isinstance(given, str):
        return
    for suffix in sorted(given):  # one order on all ranks: all raise the same error
        about = matches([suffix], names)
        if not about:
            rule = f"{suffix!r} matches no linear layer"
            raise UserError(f"{option}={shown(given)}", rule, did_you_mean(suffix, suffixes(plan.linears)))
        if option == "target_modules" and all(_is_saved(name, config) for name in about):
            rule = f"so {suffix!r} of target_modules has no effect"
            way_out = "a module is trained in full or by LoRA: take it out of one of the two"
            raise UserError(f"modules_to_save={list(config.modules_to_save or ())}", rule, way_out)


def _is_saved(name: str, config: LoraConfig) -> bool:
    """Whether PEFT drops `name` from the targets because it is trained in full."""
    return any(re.match(rf"(^|.*\.){saved}($|\..*)", name) for saved in config.modules_to_save or ())


def suffixes(names: Iterable[str]) -> set[str]:
    """The last parts of `names`."""
    return {name.rpartition(".")[2] for name in names}


def shown(targets: Any) -> str:
    """Names or a pattern, for messages."""
    if isinstance(targets, str) or targets is None:
        return repr(targets)
    return str(sorted(targets))  # sets have no order of their own
