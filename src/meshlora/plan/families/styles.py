"""Conversion of transformers' tensor-parallel plans to `FamilyPlan`.

Owns: the meaning of each style in `config.base_model_tp_plan`. Does not own: families that need more
(`wings.tables`), the rules that follow (`plan.rules`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, KeysView
from dataclasses import replace
from typing import Any

from torch import nn

from meshlora.feature import first_answer
from meshlora.plan.families.family import COLUMN, ROW, FamilyPlan, Leaf
from meshlora_ground.errors import UnsupportedError

# Styles of transformers' tensor-parallel plans that split a linear.
_LEAVES = {"colwise": COLUMN, "rowwise": ROW}
# Styles of modules that are not split, or whose own parameters the plan names, which need no entry; experts of a form
# that is known have rules of their own, others are whole.
_WHOLE = {"replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "moe_tp_experts", "moe_identity_expert"}
# Blocks with one of these styles are kept whole on every rank, as transformers gathers inside them.
_GATHERS = {"colwise_gather_output", "rowwise_split_input"}


def family_plan(model: Any, layers_name: str, layers: nn.ModuleList, experts: Collection[str]) -> FamilyPlan:
    """The explicit plan of the family if there is one, else transformers' plan, else one that a wing finds.

    experts: names of the routed experts modules and their blocks, which have their own rules.

    Raises:
        UnsupportedError: there is no plan; an unknown style; an explicit plan that matches no module.
    """
    config = model.config.get_text_config()
    model_type = config.model_type
    if (family := known_plan(config)) is not None:
        if family.leaves and not _paths(layers) & family.leaves.keys():
            raise UnsupportedError(f"model_type {model_type!r}", "its layers are not those of its plan", "use tp=1")
        return family
    plan: dict[str, str] | None = getattr(config, "base_model_tp_plan", None)
    if not plan:
        if (found := first_answer(lambda wing: wing.found_plan(model, layers_name, experts))) is not None:
            return _with_streams(found, layers)
        rule = "neither transformers nor meshlora has a tensor-parallel plan for it"
        raise UnsupportedError(f"model_type {model_type!r}", rule, "use tp=1, with dp as you like")
    start = f"{layers_name.rpartition('.')[2]}.*."  # in decoder layers: `layers.*.mlp.up_proj` -> `mlp.up_proj`
    paths, named = _paths(layers), [path for layer in layers for path, _ in layer.named_parameters()]
    # Parameters that no linear or norm owns, as attention sinks.
    owned = {path: None for path in named if not path.endswith((".weight", ".bias"))}
    apart = {name.removeprefix(f"{layers_name}.").partition(".")[2] for name in experts}
    styles: dict[str, str] = {}  # path of a module -> its style
    parameters: dict[str, int] = {}
    seen = set()
    for key, style in plan.items():
        pattern = _regex(key.removeprefix(start))
        if not key.startswith(start) or any(map(pattern.fullmatch, apart)):
            continue
        for path in owned:
            if style == "colwise" and pattern.fullmatch(path) and path.rpartition(".")[0] not in apart:
                parameters[path] = 0
        for path in paths:
            if pattern.fullmatch(path):
                # The first pattern that matches counts.
                styles.setdefault(path, style)
                seen.add(style)
    unknown = sorted(seen - _LEAVES.keys() - _WHOLE - _GATHERS)
    if unknown:
        rule = f"its plan has styles that are not supported yet: {unknown}"
        raise UnsupportedError(f"model_type {model_type!r}", rule, "use tp=1")
    gathering = {_block(path) for path, style in styles.items() if style in _GATHERS}
    leaves: dict[str, Leaf] = {}
    for path in paths:  # in module order
        if styles.get(path) in _LEAVES and _block(path) not in gathering:
            leaves[path] = _LEAVES[styles[path]]
    return _with_streams(FamilyPlan(leaves, parameters=parameters), layers)


def known_plan(config: Any) -> FamilyPlan | None:
    """The plan that a table of a wing has of the family of a text part's `config`, or None."""
    return first_answer(lambda wing: wing.known_plan(config))


def _with_streams(plan: FamilyPlan, layers: nn.ModuleList) -> FamilyPlan:
    """`plan`, of layers with several residual streams or one: what mixes streams sees each token by itself."""
    mixing = [path for path, module in layers[0].named_children() if "HyperConnection" in type(module).__name__]
    if not mixing:
        return plan
    after = dict.fromkeys((*plan.after, "hc_head"))
    return replace(plan, token_wise=(*plan.token_wise, *mixing), after=tuple(after))


def _paths(layers: nn.ModuleList) -> KeysView[str]:
    """The names of all modules in the layers, relative to theirs, in order: layers need not be alike."""
    return dict.fromkeys(path for layer in layers for path, _ in layer.named_modules()).keys()


def text_decoder(model: Any) -> tuple[str, Any]:
    """(name, module) of the text part of a composite, such as `model.language_model`, or of the decoder beside an
    encoder; ("", model) of another model."""
    if model.config.get_text_config() is model.config and not model.config.is_encoder_decoder:
        return "", model
    decoder = model.get_decoder()
    return next((name, module) for name, module in model.named_modules() if module is decoder)


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))


def _block(path: str) -> str:
    return path.partition(".")[0]
