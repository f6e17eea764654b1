"""Adapter folders for serving engines, with one pair of factors per expert, and back to PEFT's fused form.

Owns: which layout engines read, the single rank and scale of an adapter in an engine, and both configurations. Does not
own: the keys, and reading such a folder (`wings.experts.per_expert`); writing a folder (`meshlora_extra.paper.export`).

vLLM reads `r` and `lora_alpha` of `adapter_config.json` and ignores patterns. Targets of different ranks and equal
scale are padded with zeros to the largest rank, which changes no product; different scales are refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from meshlora.adapter.formats.adapter_file import open_adapter, read_adapter_tensors
from meshlora.adapter.formats.file_tensors import ExpertFactors, base_keys, file_keys, file_tensors
from meshlora.adapter.formats.peft_format import CONFIG_FILE, WEIGHTS_FILE, plan_folder, read_config, read_factors
from meshlora.adapter.plan import AdapterPlan, plan_adapter
from meshlora.adapter.targets.pieces import own_words
from meshlora.adapter.targets.resolve import Target
from meshlora.plan.rules import ModelPlan
from meshlora.wings.experts.per_expert import (
    by_projection,
    check_lora_alone,
    engine_factors,
    engine_names,
    engine_tensors,
    is_per_expert,
    reads_fused_experts,
)
from meshlora_extra.paper.export import check_new, export, write_folder
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.files import read_json

# Of a configuration whose targets are named in full, or by keys.
_NAMED = {"exclude_modules": None, "layers_to_transform": None, "layers_pattern": None, "lora_dropout": 0.0}


def engine_layout(adapter: AdapterPlan, plan: ModelPlan, where: str) -> Literal["peft", "per-expert"]:
    """The layout in which engines read `adapter`. where: it is, for messages.

    Raises:
        UserError: targets of several scales. UnsupportedError: what engines read in no layout, by name.
    """
    targets = adapter.targets
    if adapter.rows:  # `trainable_token_indices`
        words = "engines take LoRA, and no rows of a vocabulary besides"
        raise UnsupportedError(f"{where}: trainable_token_indices", words, "merge it: meshlora merge")
    if not adapter.config.target_parameters:
        return "peft"
    check_lora_alone(adapter.config, where)
    _check_targets(where, targets, plan)
    if reads_fused_experts(plan.model_type):
        _check_fused(where, targets, plan)
        return "peft"
    engine_names(plan.model_type)  # refuses families that no engine reads so
    _one_scaling(where, targets)
    return "per-expert"


def _check_fused(where: str, targets: Mapping[str, Target], plan: ModelPlan) -> None:
    """Refuse an adapter on fused experts that engines would compute otherwise, or not at all."""
    for rule in plan.experts.values():
        there = [each for each in rule.projections if each.name in targets]
        if len(there) == 1:
            words = f"of the experts it is on {there[0].name} alone, and engines need both projections or none"
            raise UnsupportedError(where, words, "train both, or merge it: meshlora merge")
        for one in there:
            if one.is_swapped:
                words = f"the file has the A of {one.name} on the side of the output, where engines read its B"
                raise UnsupportedError(where, words, "merge it: meshlora merge")
    _one_scaling(where, targets)
    # On disk the pieces of a matrix are one adapter of the sum of their ranks.
    ranks = {name: target.r * max(1, len(target.pieces)) for name, target in targets.items()}
    first = next(iter(ranks))
    for name, r in ranks.items():
        if r != ranks[first]:
            words = f"{first} has rank {ranks[first]}, {name} {r}, and engines read one"
            raise UnsupportedError(where, words, "train without rank_pattern and pieces, or merge it")


def export_for_engines(adapter: str | Path, out: str | Path, *, model: Any, plan: ModelPlan) -> None:
    """Write the PEFT folder `adapter`, on experts, as `out`, in the layout that engines read.

    Args and Raises: as of `export_per_expert`.
    """
    folder = Path(adapter)
    config = read_config(folder, ignore_dropout=True)
    planned = plan_adapter(model, plan, config, strict=False, folder=folder)
    if engine_layout(planned, plan, f"{folder}") == "per-expert":
        export_per_expert(folder, out, model=model, plan=plan)
    else:
        _check_no_base(folder, read_adapter_tensors(folder / WEIGHTS_FILE), planned.targets, plan)
        read_factors(planned, plan)
        export(folder, out, "peft")


class Exported(NamedTuple):
    """The result of an export: its single rank, and the number of targets padded with zeros to it."""

    num_tensors: int
    r: int
    num_padded: int

    def __str__(self) -> str:
        padded = ""
        if self.num_padded:
            padded = f", {self.num_padded} targets padded to it with zeros"
        return f"rank {self.r}{padded}: {self.num_tensors}"


def export_per_expert(adapter: str | Path, out: str | Path, *, model: Any, plan: ModelPlan) -> Exported:
    """Write the PEFT folder `adapter` as `out`, with separate keys for the factors of each expert.

    Args:
        model: on the meta device. plan: that of `model`, on any topology.

    Raises:
        UserError: files missing, damaged or of another model; no experts; several scales; `out` exists.
        UnsupportedError: a target or option that engines do not read, by name.
    """
    folder, target = Path(adapter), Path(out)
    check_new(target)
    if not plan.experts:
        why = f"{plan.model_type!r} has no routed experts"
        raise UserError("--layout per-expert", why, "engines read its adapters in PEFT's form")
    config = read_config(folder, ignore_dropout=True)
    tensors = read_adapter_tensors(folder / WEIGHTS_FILE)
    if is_per_expert(tensors):
        raise UserError(f"{folder}", "it has one adapter for each expert already", "serve it as it is")
    check_lora_alone(config, f"{folder / CONFIG_FILE}")
    planned = plan_adapter(model, plan, config, strict=False, folder=folder)
    targets = planned.targets
    _check_targets(f"{folder}", targets, plan)
    engine_layout(planned, plan, f"{folder}")
    names = engine_names(plan.model_type)  # refuses what engines read as it is, once that is known to be so
    _check_no_base(folder, tensors, targets, plan)
    full, _ = read_factors(planned, plan)  # split into experts
    # On disk the pieces of a linear are one adapter whose rank is the sum of theirs.
    ranks = {name: each.r if each.num_experts else each.r * max(1, len(each.pieces)) for name, each in targets.items()}
    r, scaling = max(ranks.values()), _one_scaling(f"{folder}", targets)
    linears = {name: each for name, each in targets.items() if not each.num_experts}
    # Weights of the base that PEFT stores beside.
    written = {key: tensors[key] for key in base_keys(linears, plan).values() if key in tensors}
    for (_, side), key in file_keys(linears).items():
        written[key] = _padded(tensors[key], r, dim="AB".index(side))  # A: [r, in], B: [out, r]
    for rule in plan.experts.values():
        padded = {}
        for name, factors in by_projection(rule, full).items():
            padded[name] = ExpertFactors(_padded(factors.a, r, dim=1), _padded(factors.b, r, dim=2))
        if padded:  # LoRA is on this layer's experts
            written |= engine_tensors(rule.name, padded, num_experts=rule.num_experts, names=names)
    stored = read_json(folder / CONFIG_FILE) | _one_rank(r, scaling)
    # Last parts of names: engines match these.
    stored["target_modules"] = sorted({name.rpartition(".")[2] for name in linears} | {*names.projections.values()})
    write_folder(target, written, stored, {})
    return Exported(len(written), r, sum(own < r for own in ranks.values()))


def import_per_expert(adapter: str | Path, out: str | Path, *, model: Any, plan: ModelPlan) -> int:
    """The inverse of `export_per_expert`; returns the number of tensors. Also writes `meshlora.json` if gate and up
    have an A each or experts share one adapter. Zeros from padding are kept: they change nothing.

    Raises:
        UserError: files missing, damaged, of another model or already in PEFT's form; `out` exists.
        UnsupportedError: the adapter on experts is more than LoRA of one rank.
    """
    folder, target = Path(adapter), Path(out)
    check_new(target)
    file = folder / WEIGHTS_FILE
    planned = plan_folder(model, plan, folder, ignore_dropout=True)
    config, targets = planned.config, planned.targets
    factors = engine_factors(file, targets, plan)
    if factors is None:
        rule = "it is in PEFT's form, which is no different for any model"
        raise UserError(f"{folder} and --model", rule, "leave out --model")
    full = {targets[name].name_of(part): tensor for name, parts in factors.items() for part, tensor in parts.items()}
    written = file_tensors(full, targets)
    with open_adapter(file) as opened:
        besides = opened.keys().intersection(base_keys(targets, plan).values())  # embeddings that were resized
        written |= {key: opened.get_tensor(key).clone() for key in besides}
    stored = read_json(folder / CONFIG_FILE) | {
        **_NAMED,  # no dropout: PEFT has none on parameters
        "target_modules": sorted(config.target_modules or ()),
        "target_parameters": list(config.target_parameters or ()),
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
    }
    write_folder(target, written, stored, own_words(config))
    return len(written)


def _check_targets(where: str, targets: Mapping[str, Target], plan: ModelPlan) -> None:
    if not any(target.num_experts for target in targets.values()):
        raise UserError(where, "it is on no experts, and engines read the rest in PEFT's form", "serve it as it is")
    for name in targets:
        if name in plan.routers:
            rule = "not every engine applies it"
            raise UnsupportedError(f"{where}: LoRA on the router {name}", rule, "merge it: meshlora merge")


def _check_no_base(folder: Path, tensors: Collection[str], targets: Collection[str], plan: ModelPlan) -> None:
    """Refuse an embedding or a head of the base in the folder: PEFT loads it, engines do not."""
    for name, key in base_keys(targets, plan).items():
        if name not in targets and key in tensors:
            rule = "it is a weight of the base, which engines do not read"
            raise UnsupportedError(f"{folder}: {key}", rule, "merge it: meshlora merge")


def _one_scaling(where: str, targets: Mapping[str, Target]) -> float:
    """The common scale of `B A`. Raises: UserError: two targets differ."""
    first = next(iter(targets.values()))
    for other in targets.values():
        # With use_rslora the scale of pieces comes from a square root.
        if not math.isclose(other.scaling, first.scaling, rel_tol=1e-12):
            given = f"{where}: {first.name} is scaled by {first.scaling:g}, {other.name} by {other.scaling:g}"
            rule = "engines know one lora_alpha and one r for all of an adapter"
            raise UserError(given, rule, "train with the same lora_alpha / r everywhere, or merge it: meshlora merge")
    return first.scaling


def _one_rank(r: int, scaling: float) -> dict[str, Any]:
    """The entries of `adapter_config.json` for one rank and one scale, with targets named by keys.

    Always alpha / r, never rsLoRA: PEFT reads such a file as pieces of gate_up, of twice the rank and twice the alpha,
    which under rsLoRA is another scale.
    """
    product = scaling * r
    # Rounding may have moved it by a digit.
    near = (float(f"{product:.12g}"), product, math.nextafter(product, 0), math.nextafter(product, math.inf))
    alpha = next((each for each in near if each / r == scaling), product)  # PEFT divides it by r again
    if alpha == int(alpha):
        alpha = int(alpha)
    return {
        "r": r,
        "lora_alpha": alpha,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_parameters": None,
        "inference_mode": True,
        **_NAMED,
    }


def _padded(factor: Tensor, r: int, *, dim: int) -> Tensor:
    """`factor` padded with zeros to rank `r` along `dim`."""
    shape = list(factor.shape)
    if shape[dim] == r:
        return factor
    shape[dim] = r - shape[dim]
    return torch.cat([factor, factor.new_zeros(shape)], dim)
