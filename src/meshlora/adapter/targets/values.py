"""The values of an adapter's options: types and ranges, whatever the adapter is for.

Owns: refusing what PEFT takes unseen, fails on far away, or reads as something else. Does not own: patterns
(`adapter.targets.patterns`), which options are followed (`adapter.targets.resolve` for training,
`adapter.merging.changes` for merging).
"""

from __future__ import annotations

from peft import LoraConfig, LoraRuntimeConfig

from meshlora.adapter.targets.patterns import check_patterns
from meshlora.common.errors import UserError

_BIASES = ("none", "all", "lora_only")
# Far beyond the width of any matrix; and what float32 can still multiply with.
_LARGEST_RANK, _LARGEST_ALPHA = 2**16, 1e9


def check_values(config: LoraConfig) -> None:
    """Types and ranges of the options that PEFT takes unseen, fails on far away, or reads as something else.

    Raises:
        UserError: names the option.
    """
    if config.bias not in _BIASES:
        raise UserError(f"LoraConfig(bias={config.bias!r})", f"one of {', '.join(_BIASES)}")
    _check_types(config)
    check_patterns(config)
    for what, rank in [("r", config.r), *((f"rank_pattern[{k!r}]", v) for k, v in (config.rank_pattern or {}).items())]:
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= _LARGEST_RANK:
            raise UserError(
                f"LoraConfig({what}={rank!r})", f"a rank is a whole number of at least 1, at most {_LARGEST_RANK}"
            )
    dropout = config.lora_dropout
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        raise UserError(f"LoraConfig(lora_dropout={dropout!r})", "it is a share in [0, 1)", "0.05 to 0.1 is usual")
    alphas = [("lora_alpha", config.lora_alpha)]
    alphas += [(f"alpha_pattern[{k!r}]", v) for k, v in (config.alpha_pattern or {}).items()]
    for what, alpha in alphas:
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= _LARGEST_ALPHA:
            raise UserError(
                f"LoraConfig({what}={alpha!r})",
                f"lora_alpha is a number above 0, at most {_LARGEST_ALPHA:g}",
                "2 * r is usual",
            )


def _check_types(config: LoraConfig) -> None:
    """Patterns, names and flags."""
    layers = config.layers_to_transform
    if layers is not None and not all(
        type(i) is int for i in (layers if isinstance(layers, list | tuple) else [layers])
    ):
        raise UserError(f"LoraConfig(layers_to_transform={layers!r})", "it is a whole number or a list of them")
    patterns = config.layers_pattern
    if patterns is not None and not isinstance(patterns, str) and not _are_names(patterns):
        raise UserError(f"LoraConfig(layers_pattern={patterns!r})", "it is a name or a list of names")
    for option in ("use_rslora", "use_dora", "fan_in_fan_out"):
        if not isinstance(getattr(config, option), bool):
            raise UserError(f"LoraConfig({option}={getattr(config, option)!r})", "it is true or false")
    if not isinstance(config.runtime_config, LoraRuntimeConfig | dict):
        raise UserError(f"LoraConfig(runtime_config={config.runtime_config!r})", "it is a group of keys")
    for option in ("rank_pattern", "alpha_pattern"):
        value = getattr(config, option)
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise UserError(f"LoraConfig({option}={value!r})", "it maps patterns to numbers, as in {q_proj: 8}")
    for option in ("modules_to_save", "target_parameters"):
        value = getattr(config, option)
        if value is not None and not _are_names(value):
            raise UserError(f"LoraConfig({option}={value!r})", "it is a list of names")
    for option in ("target_modules", "exclude_modules"):
        value = getattr(config, option)
        if value is not None and not isinstance(value, str) and not _are_names(value):
            raise UserError(f"LoraConfig({option}={value!r})", "it is a list of names or one regular expression")


def _are_names(value: object) -> bool:
    return isinstance(value, list | tuple | set) and all(isinstance(name, str) for name in value)
