"""Targets among parameters: `target_parameters` of `peft.LoraConfig`, for projections of experts and other matrices.

Owns: the projections of experts and other matrices that a configuration names; names of single projections
(`gate_proj`, `up_proj`) of a fused one. Does not own: linears by `target_modules` (`adapter.targets.resolve`).

PEFT matches `target_parameters` by name suffix and ignores `layers_to_transform` and `exclude_modules`. Here both
apply, and the resulting names are stored. Nor are names rewritten: in many families PEFT takes `gate_proj` in
`target_modules` for the experts' and then skips the linears of that name.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from meshlora.adapter.targets.options import matches, pattern_key
from meshlora.adapter.targets.pieces import with_pieces
from meshlora.adapter.targets.resolve import KINDS
from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora_ground.compat.peft_targets import rewrite_targets
from meshlora_ground.errors import UnsupportedError, UserError, did_you_mean


def with_whole_projections(config: LoraConfig, plan: ModelPlan) -> LoraConfig:
    """`config` with `target_parameters` that exist in the model: `experts.gate_proj` and `experts.up_proj` become the
    pieces `gate` and `up` of `experts.gate_up_proj`, each with its given rank and scale.
    """
    given = list(config.target_parameters or ())
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for name in given:
        owner, _, leaf = name.rpartition(".")
        fused = f"{owner}.gate_up_proj" if owner else "gate_up_proj"
        # Where the model has a matrix of that name, the name is about it.
        is_piece = leaf in ("gate_proj", "up_proj") and not matches([name], plan.projections)
        if is_piece and _are_fused(fused, plan):
            found.setdefault(fused, []).append(leaf.removesuffix("_proj"))
            name = fused
        if name not in names:
            names.append(name)
    if not found:
        return config
    whole = [name for name in given if name in names]
    if clash := matches(found, matches(whole, plan.projections)):  # full names and suffixes alike
        rule = f"{clash[0]} and its parts are both named"
        raise UserError(f"target_parameters={given}", rule, "name one A for both, or each part")
    for projection in plan.projections:
        about = [fused for fused in found if matches([fused], [projection])]
        if len(about) > 1:
            rule = f"{' and '.join(about)} are about the same experts, {projection}"
            raise UserError(f"target_parameters={given}", rule, "name gate_proj and up_proj of them in the same way")
    ordered = {fused: sorted(pieces) for fused, pieces in found.items()}  # gate, then up
    plain = dataclasses.replace(config, target_parameters=names)
    plain.rank_pattern = _fused_pattern(config.rank_pattern, config.r, ordered, names, "rank_pattern", plan)
    plain.alpha_pattern = _fused_pattern(config.alpha_pattern, config.lora_alpha, ordered, names, "alpha_pattern", plan)
    return with_pieces(plain, ordered)


def _are_fused(name: str, plan: ModelPlan) -> bool:
    """Whether there are projections of this name or suffix, and all have gate and up in one matrix."""
    about = matches([name], plan.projections)
    return bool(about) and all(plan.projections[projection].fused is not None for projection in about)


def _fused_pattern(
    pattern: dict[str, Any],
    default: Any,
    fused: Mapping[str, Iterable[str]],
    named: Collection[str],
    option: str,
    plan: ModelPlan,
) -> dict[str, Any]:
    """`pattern` with entries for `gate_proj` and `up_proj` of experts, which must agree, merged into one for
    `gate_up_proj`. named: `target_parameters` with the fused names.
    """
    changed = dict(pattern)
    replaced: set[str] = set()
    others = [*plan.linears, *matches(named, _parameters(plan))]
    for name, pieces in fused.items():
        parts = [f"{name.removesuffix('gate_up_proj')}{piece}_proj" for piece in pieces]
        for projection in matches([name], plan.projections):
            _check_about_all(pattern, parts, projection, option)
        keys = [pattern_key(pattern, part) for part in parts]
        values = {pattern.get(key, default) for key in keys}
        if len(values) > 1:
            rule = f"{' and '.join(parts)} have one rank and one scale"
            raise UnsupportedError(f"{option}={pattern}", rule, "give both the same")
        if pattern.keys() >= {*keys}:  # else both have the default
            # The first match wins, so this entry takes the position of the last one it replaces.
            last = max(keys, key=list(pattern).index)
            changed = _put_before(changed, last, name, values.pop())
        replaced |= {*keys}
    # After all of them: two entries of target_parameters may have been read by one pattern.
    for key in replaced:
        if not any(pattern_key([key], other) == key for other in others):  # else others use it too
            changed.pop(key, None)
    return changed


def _check_about_all(pattern: Mapping[str, Any], parts: Iterable[str], projection: str, option: str) -> None:
    """Refuse an entry about gate or up of one `projection` alone: one merged entry cannot express both. Raises:
    UserError: names the entry."""
    for part in parts:
        end = part.rpartition(".")[2]
        own = pattern_key(pattern, projection.removesuffix("gate_up_proj") + end)
        if own in pattern and own != pattern_key(pattern, part):
            given = f"{option}={pattern}"
            rule = f"{own!r} is about {end} of {projection}, and not about all of {part}"
            raise UserError(given, rule, f"give the pattern for {part}, or name gate_up_proj in target_parameters")


def _put_before(pattern: Mapping[str, Any], other: str, name: str, value: Any) -> dict[str, Any]:
    """`pattern` with `name` before the entry `other`, and not where it was."""
    found = {}
    for key, own in pattern.items():
        if key == other:
            found[name] = value
        if key != name:
            found[key] = own
    return found


def matched_parameters(model: Any, plan: ModelPlan, config: LoraConfig) -> list[str]:
    """The matches of `target_parameters`: projections of experts, and linears (for their `weight`).

    Raises:
        UserError: an entry matches nothing. UnsupportedError: it matches another kind of parameter.
    """
    wanted = list(config.target_parameters or ())
    every = _parameters(plan)
    others = [name for name, _ in model.named_parameters() if name not in every]
    for name in wanted:  # one by one: each is to match something
        if matches([name], every):
            continue
        if other := matches([name], others):
            rule = "LoRA on this parameter is not supported"
            raise UnsupportedError(f"target_parameters matches {other[0]}", rule, "leave it out")
        given = f"target_parameters={wanted}"
        rule = f"{name!r} matches no parameter of the model"
        raise UserError(given, rule, did_you_mean(name, {_short(full) for full in plan.projections or every}))
    return [name.removesuffix(".weight") for name in matches(wanted, every) if _is_chosen(name, config)]


def _parameters(plan: ModelPlan) -> list[str]:
    """Names of all parameters that can have an adapter."""
    return [*plan.projections, *(f"{name}.weight" for name in (*plan.linears, *plan.matrices))]


def _is_chosen(name: str, config: LoraConfig) -> bool:
    """Whether `layers_to_transform`, `layers_pattern` and `exclude_modules` keep `name`."""
    # By its last part: for a full name PEFT ignores the other options.
    end = name.removesuffix(".weight").rpartition(".")[2]
    asked = dataclasses.replace(config, target_modules={end}, target_parameters=None)
    return bool(check_target_module_exists(asked, name.removesuffix(".weight")))


def _short(name: str) -> str:
    """The name inside its layer: `model.layers.0.mlp.experts.down_proj` -> `mlp.experts.down_proj`."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[index + 1 :])
    return name


def check_targets(config: LoraConfig, modules: Collection[str], by_weight: Collection[str], plan: ModelPlan) -> None:
    """Refuse options that some targets cannot have, and targets that are named twice.

    modules: the matches of `target_modules`. by_weight: those of `target_parameters`.

    Raises:
        UnsupportedError: as `_check_options`. UserError: as it; PEFT would refuse the adapter, and its file, as both
            name a linear: not where it reads the module's name as that of experts.
    """
    _check_options(config, dict.fromkeys([*modules, *by_weight]), plan)  # each once, in order
    for name in modules:
        if name in by_weight and not _is_rewritten(name.rpartition(".")[2], plan.model_type):
            given = f"target_modules and target_parameters: both name {name}"
            rule = "PEFT has one adapter on a weight, and refuses a file with two"
            raise UserError(given, rule, "take it out of one of the two")


def _check_options(config: LoraConfig, matched: Iterable[str], plan: ModelPlan) -> None:
    """Refuse options that experts, routers, and linears targeted as parameters cannot have. Raises: UnsupportedError:
    DoRA, PiSSA or OLoRA. UserError: `share_experts` without experts."""
    asked: dict[str, Any] = {option: getattr(config, option) for option in KINDS}
    has_experts, transposed = False, ""
    for name in matched:
        has_experts = has_experts or name in plan.projections
        # The first of each: `check` refuses by what there is, and names it. Projections come before routers.
        if name in plan.projections or name in plan.matrices:
            asked.setdefault("an adapter on experts or routers", name)
        if name not in plan.linears:
            continue
        if _is_rewritten(name.rpartition(".")[2], plan.model_type):
            asked.setdefault("renamed", name)
        if matches(config.target_parameters or (), [f"{name}.weight"]):
            asked.setdefault("by_weight", name)
            if plan.linears[name].is_transposed:
                transposed = transposed or name
    if getattr(config, "share_experts", False) and not has_experts:
        raise UserError("share_experts", "no experts are among the targets", "name them in target_parameters")
    check(asked)
    if transposed:
        given = f"target_parameters: {transposed}, which is stored [in, out]"
        raise UnsupportedError(given, "PEFT has none for a parameter", "name it in target_modules, and only there")


def with_stored_parameters(config: LoraConfig, targets: Iterable[str], plan: ModelPlan) -> LoraConfig:
    """A copy with the `target_parameters` to store: as given if they match exactly the targets, else full names."""
    config = dataclasses.replace(with_whole_projections(config, plan))
    given = list(config.target_parameters or ())
    names = [name if name in plan.projections else f"{name}.weight" for name in targets]
    about = set(matches(given, _parameters(plan)))
    config.target_parameters = given or None
    if not about <= set(names):
        config.target_parameters = [name for name in names if name in about]
    return config


def out_of_reach(config: LoraConfig, modules: Iterable[str], model_type: str) -> LoraConfig:
    """`config` in terms that PEFT does not rewrite: linears whose names PEFT would take for experts are named as
    parameters, `MODULE.weight`, which give the same numbers under the same keys.

    modules: the targets among linears and the embedding.
    """
    named = list(modules)
    reached = [name for name in named if _is_rewritten(name.rpartition(".")[2], model_type)]
    if not reached:
        return config
    kept = [name for name in named if name not in reached]
    given = config.target_modules if isinstance(config.target_modules, set | list) else ()
    # What is given about others alone stays, and what it does not name is named in full.
    ends = {end for end in given if not matches([end], reached)}
    ends |= set(kept) - set(matches(ends, kept))
    found = dataclasses.replace(config, target_modules=ends)
    own = [f"{name}.weight" for name in reached]
    found.target_parameters = [*(n for n in config.target_parameters or () if n not in own), *own]
    for name in reached:
        key = re.escape(f"{name}.weight")
        for option, default in (("rank_pattern", config.r), ("alpha_pattern", config.lora_alpha)):
            pattern = getattr(config, option)
            # An entry about the module is no entry about its weight: it is written again.
            value = pattern.get(pattern_key(pattern, name), default)
            if value != default:
                setattr(found, option, getattr(found, option) | {key: value})
    return found


@functools.cache
def _is_rewritten(leaf: str, model_type: str) -> bool:
    """Whether PEFT takes `leaf` in `target_modules` of a family for its experts."""
    config = LoraConfig(target_modules=[leaf])
    stand_in: Any = types.SimpleNamespace(config=types.SimpleNamespace(model_type=model_type))
    try:
        rewrite_targets(config, stand_in)
    except ValueError:  # it requires gate and up together
        return True
    return set(config.target_modules or ()) != {leaf}
