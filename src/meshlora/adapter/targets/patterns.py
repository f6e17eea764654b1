"""The patterns of an adapter's options, matched as PEFT matches them, and in time.

Owns: which options hold regular expressions, and what PEFT puts around each; refusing those that are none, that take
too long on the names of a model, or that are about none of them. Does not own: which names are targets
(`adapter.targets.resolve`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from peft import LoraConfig

from meshlora.common.errors import UserError, did_you_mean
from meshlora.common.limits import OutOfTimeError, time_limit
from meshlora.plan.rules import ModelPlan

# All of them on all names take milliseconds.
_SECONDS = 1.0
# What PEFT matches, with the option's text for {}; the first two, where they are no list of names, as a whole.
_FORMS = {
    "target_modules": "{}",
    "exclude_modules": "{}",
    "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
    "rank_pattern": r"(.*\.)?({})$",
    "alpha_pattern": r"(.*\.)?({})$",
    "modules_to_save": r"(^|.*\.){}($|\..*)",
}


def check_patterns(config: LoraConfig, names: Iterable[str] = ()) -> None:
    """Match every pattern of `config`, whose options have the right types, against every one of `names`.

    Raises:
        UserError: one is no regular expression, or all of them take too long; names the one that was at it.
    """
    names = [*names, *(config.target_parameters or ())]
    given = "LoraConfig"
    try:
        with time_limit(_SECONDS):
            for option, pattern in _patterns(config):
                given = f"LoraConfig({option}={pattern!r})"
                compiled = _compiled(_FORMS[option].replace("{}", pattern))
                match = compiled.fullmatch if _FORMS[option] == "{}" else compiled.match
                for name in names:
                    match(name)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(given, f"it is not a regular expression ({error})") from None
    except OutOfTimeError:
        rule = f"its patterns take more than {_SECONDS:.0f} s on the names of the model"
        raise UserError(given, rule, "use a simpler pattern, or a list of names") from None


def pattern_key(patterns: Iterable[str], name: str) -> str:
    """PEFT's `get_pattern_key`: the first of `patterns` that is about `name`; none: `name` itself."""
    return next((key for key in patterns if _compiled(_FORMS["rank_pattern"].replace("{}", key)).match(name)), name)


def _patterns(config: LoraConfig) -> Iterator[tuple[str, str]]:
    """(option, its text) of all."""
    for option in _FORMS:
        value = getattr(config, option) or ()
        if option in ("target_modules", "exclude_modules"):
            value = [value] if isinstance(value, str) and value != "all-linear" else ()
        for pattern in [value] if isinstance(value, str) else value:
            yield option, pattern


@functools.lru_cache(maxsize=2**16)  # `re` keeps 512, and an adapter may have a rank for each module
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def check_each_pattern(plan: ModelPlan, config: LoraConfig, matched: list[str]) -> None:
    """Every suffix, rank pattern and alpha pattern has an effect on at least one linear; every layer index exists."""
    indices = config.layers_to_transform
    for index in [indices] if isinstance(indices, int) else indices or []:
        if not 0 <= index < plan.num_layers:
            raise UserError(
                f"layers_to_transform={indices}", f"the model has {plan.num_layers} layers, 0 to {plan.num_layers - 1}"
            )
    every = {"target_modules": [*plan.linears, plan.embedding]}
    every["exclude_modules"] = [*every["target_modules"], *plan.projections, *plan.matrices]
    for option in every:
        given = getattr(config, option) or ()
        for suffix in [] if isinstance(given, str) else sorted(given):
            about = [n for n in every[option] if n == suffix or n.endswith(f".{suffix}")]
            if not about:
                raise UserError(
                    f"{option}={shown(given)}",
                    f"{suffix!r} matches no linear layer",
                    did_you_mean(suffix, suffixes(plan.linears)),
                )
            if option == "target_modules" and all(_is_saved(name, config) for name in about):
                raise UserError(
                    f"modules_to_save={list(config.modules_to_save or ())}",
                    f"so {suffix!r} of target_modules has no effect",
                    "a module is trained in full or by LoRA: take it out of one of the two",
                )
    excluded = config.exclude_modules
    if isinstance(excluded, str) and not any(re.fullmatch(excluded, name) for name in every["exclude_modules"]):
        raise UserError(
            f"exclude_modules={excluded!r}", "it matches no linear layer", "a text is a pattern for whole names"
        )
    for option in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, option) or {}:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in matched):
                raise UserError(
                    f"{option}={getattr(config, option)}",
                    f"{pattern!r} matches none of the targets",
                    did_you_mean(pattern, suffixes(matched)),
                )


def _is_saved(name: str, config: LoraConfig) -> bool:
    """Whether PEFT leaves `name` out of the targets, as it is trained in full."""
    return any(re.match(rf"(^|.*\.){saved}($|\..*)", name) for saved in config.modules_to_save or ())


def suffixes(names: Iterable[str]) -> set[str]:
    """The last parts of `names`."""
    return {name.rpartition(".")[2] for name in names}


def shown(targets: Any) -> str:
    """Names or a pattern, for messages."""
    return repr(targets) if isinstance(targets, str) or targets is None else str(sorted(targets))
