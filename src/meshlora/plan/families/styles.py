"""transformers' own tensor-parallel plans, in our words.

Owns: what each style of `config.base_model_tp_plan` means here. Does not own: families that need more
(`plan.families.explicit`), and what follows (`plan.rules`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from meshlora.common.errors import UnsupportedError
from meshlora.plan.families.explicit import explicit_plan
from meshlora.plan.families.family import COLUMN, ROW, FamilyPlan

_LEAVES = {"colwise": COLUMN, "rowwise": ROW}
# What is not split needs no word.
_WHOLE = {"replicated_with_grad_allreduce", "mla_kv_a_proj"}
# A block with one of these is kept whole on every rank: transformers gathers inside it.
_GATHERS = {"colwise_gather_output", "rowwise_split_input"}


def family_plan(model: Any, layers_name: str, layers: nn.ModuleList, experts: Collection[str]) -> FamilyPlan:
    """Our plan of the family where there is one, else what transformers says.

    experts: names of the modules of routed experts, and of the blocks around them, which have rules of their own.

    Raises:
        UnsupportedError: nobody says anything; a style that is not known; an explicit plan names what is not there.
    """
    model_type = model.config.model_type
    if (family := explicit_plan(model.config)) is not None:
        there = {name for layer in layers for name, _ in layer.named_modules()}
        if family.leaves and not there & family.leaves.keys():
            raise UnsupportedError(f"model_type {model_type!r}", "its layers are not those of its plan", "use tp=1")
        return family
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    if not plan:
        raise UnsupportedError(
            f"model_type {model_type!r}",
            "neither transformers nor meshlora has a tensor-parallel plan for it",
            "use tp=1, with dp as you like",
        )
    start = f"{layers_name}.*."  # of what is about decoder layers: `layers.*.mlp.up_proj` -> `mlp.up_proj`
    full = {f"{model.base_model_prefix}.{key}": style for key, style in plan.items()}
    inside = {_regex(key.removeprefix(start)): style for key, style in full.items() if key.startswith(start)}
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


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))


def _block(path: str) -> str:
    return path.partition(".")[0]
