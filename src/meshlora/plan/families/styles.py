"""Conversion of transformers' tensor-parallel plans to `FamilyPlan`.

Owns: the meaning of each style in `config.base_model_tp_plan`. Does not own: families that need more
(`plan.families.explicit`), the rules that follow (`plan.rules`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from meshlora.plan.families.explicit import explicit_plan
from meshlora.plan.families.family import COLUMN, ROW, FamilyPlan
from meshlora_ground.errors import UnsupportedError

_LEAVES = {"colwise": COLUMN, "rowwise": ROW}
# Styles of modules that are not split, which need no entry.
_WHOLE = {"replicated_with_grad_allreduce", "mla_kv_a_proj"}
# Blocks with one of these styles are kept whole on every rank, as transformers gathers inside them.
_GATHERS = {"colwise_gather_output", "rowwise_split_input"}


def family_plan(model: Any, layers_name: str, layers: nn.ModuleList, experts: Collection[str]) -> FamilyPlan:
    """The explicit plan of the family if there is one, else transformers' plan.

    experts: names of the routed experts modules and their blocks, which have their own rules.

    Raises:
        UnsupportedError: there is no plan; an unknown style; an explicit plan that matches no module.
    """
    config = model.config.get_text_config()
    model_type = config.model_type
    if (family := explicit_plan(config)) is not None:
        there = {name for layer in layers for name, _ in layer.named_modules()}
        if family.leaves and not there & family.leaves.keys():
            raise UnsupportedError(f"model_type {model_type!r}", "its layers are not those of its plan", "use tp=1")
        return family
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        raise UnsupportedError(
            f"model_type {model_type!r}",
            "neither transformers nor meshlora has a tensor-parallel plan for it",
            "use tp=1, with dp as you like",
        )
    start = f"{layers_name.rpartition('.')[2]}.*."  # in decoder layers: `layers.*.mlp.up_proj` -> `mlp.up_proj`
    inside = {_regex(key.removeprefix(start)): style for key, style in plan.items() if key.startswith(start)}
    paths = dict.fromkeys(path for layer in layers for path, _ in layer.named_modules())
    apart = {name.removeprefix(f"{layers_name}.").partition(".")[2] for name in experts}
    inside = {
        pattern: style
        for pattern, style in inside.items()
        if any(map(pattern.fullmatch, paths)) and not any(map(pattern.fullmatch, apart))
    }
    unknown = sorted(set(inside.values()) - _LEAVES.keys() - _WHOLE - _GATHERS)
    if unknown:
        raise UnsupportedError(
            f"model_type {model_type!r}", f"its plan has styles that are not supported yet: {unknown}", "use tp=1"
        )
    found = {path: next((s for pattern, s in inside.items() if pattern.fullmatch(path)), "") for path in paths}
    gathering = {_block(path) for path, style in found.items() if style in _GATHERS}
    return FamilyPlan({p: _LEAVES[s] for p, s in found.items() if s in _LEAVES and _block(p) not in gathering})


def text_decoder(model: Any) -> tuple[str, Any]:
    """(name, module) of the text part of a composite, such as `model.language_model`; ("", model) of another model."""
    if model.config.get_text_config() is model.config:
        return "", model
    decoder = model.get_decoder()
    return next((name, module) for name, module in model.named_modules() if module is decoder)


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))


def _block(path: str) -> str:
    return path.partition(".")[0]
