"""Adapter folders for serving engines: one rank and scale, one pair of factors per expert, and back to PEFT's form.

Owns: the single rank and scale of an adapter in an engine, and both configurations. Does not own: what engines serve
(`meshlora_extra.engines`); the keys, and reading such a folder (`wings.experts.per_expert`); writing a folder
(`meshlora_extra.paper.export`).

vLLM reads `r` and `lora_alpha` of `adapter_config.json` and ignores patterns. Targets of different ranks and equal
scale are padded with zeros to the largest rank, which changes no product; different scales are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from torch import Tensor

from meshlora.adapter.formats.adapter_file import open_adapter, read_adapter_tensors
from meshlora.adapter.formats.file_tensors import ExpertFactors, base_keys, file_keys, file_tensors
from meshlora.adapter.formats.peft_format import CONFIG_FILE, WEIGHTS_FILE, plan_folder, read_config, read_factors
from meshlora.adapter.plan import plan_adapter
from meshlora.adapter.targets.pieces import own_words
from meshlora.plan.rules import ModelPlan
from meshlora.wings.experts import per_expert
from meshlora_extra.engines import check_options, one_scaling, served
from meshlora_extra.paper.export import check_new, export, factors_of, side_of, write_folder
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.files import read_json

# Of a configuration whose targets are named in full, or by keys.
_NAMED = {"exclude_modules": None, "layers_to_transform": None, "layers_pattern": None, "lora_dropout": 0.0}


def export_for_engines(
    adapter: Path, out: Path, *, model_and_plan: Callable[[], tuple[Any, Any]] | None = None
) -> None:
    """Write the PEFT folder `adapter` as `out`, in the layout that engines read (`meshlora_extra.engines`).

    model_and_plan: of adapters on experts, whose layout the model decides: the model on the meta device, and its plan.

    Raises:
        UserError: as of `export_per_expert`. UnsupportedError: what engines do not compute.
    """
    config = read_config(adapter, ignore_dropout=True)
    check_options(config, f"{adapter / CONFIG_FILE}")
    if not config.target_parameters:
        _export_linears(adapter, out, config)
        return
    if model_and_plan is None:
        rule = "the layout of an adapter on experts is the model's"
        raise UserError(f"{adapter}", rule, "give --model FOLDER")
    model, plan = model_and_plan()
    planned = plan_adapter(model, plan, config, strict=False, folder=adapter)
    if served(planned, plan, f"{adapter}") == "per-expert":
        export_per_expert(adapter, out, model=model, plan=plan)
    else:
        _check_no_base(adapter, read_adapter_tensors(adapter / WEIGHTS_FILE), planned.targets, plan)
        read_factors(planned, plan)
        export(adapter, out, "peft")


def _export_linears(adapter: Path, out: Path, config: LoraConfig) -> None:
    """Write an adapter that is on no experts, with one rank, one scale and targets by name where it has others."""
    tensors, stored = read_adapter_tensors(adapter / WEIGHTS_FILE), read_json(adapter / CONFIG_FILE)
    per_expert.refuse_per_expert(adapter, tensors)
    factors, _ = factors_of(tensors, config, f"{adapter}", strict=False)
    scaling = one_scaling(f"{adapter}", {name: each.lora_alpha / each.r for name, each in factors.items()})
    r, written = max(each.r for each in factors.values()), {}
    for key, tensor in tensors.items():
        side = side_of(key)
        if side is None:
            rule = "it is a weight of the base, which engines do not read"
            raise UnsupportedError(f"{adapter}: {key}", rule, "merge it: meshlora merge")
        written[key] = _padded(tensor, r, dim="AB".index(side))  # A: [r, in], B: [out, r]
    if config.use_rslora or config.rank_pattern or config.alpha_pattern:
        converted = _one_rank(r, scaling)
        for option in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
            stored[option] = converted[option]
    if not isinstance(stored["target_modules"], list):  # a pattern, which not every engine reads
        stored["target_modules"] = sorted({name.rpartition(".")[2] for name in factors})
        stored["init_lora_weights"] = True  # PEFT finds more of these names: what the file lacks has no effect
    write_folder(out, written, stored, {})


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
    if per_expert.is_per_expert(tensors):
        raise UserError(f"{folder}", "it has one adapter for each expert already", "serve it as it is")
    check_options(config, f"{folder / CONFIG_FILE}")
    planned = plan_adapter(model, plan, config, strict=False, folder=folder)
    targets = planned.targets
    served(planned, plan, f"{folder}")
    if not any(target.num_experts for target in targets.values()):
        raise UserError(
            f"{folder}", "it is on no experts, and engines read the rest in PEFT's form", "serve it as it is"
        )
    names = per_expert.engine_names(plan.model_type)  # refuses what engines read as it is, once that is known to be so
    _check_no_base(folder, tensors, targets, plan)
    full, _ = read_factors(planned, plan)  # split into experts
    # On disk the pieces of a linear are one adapter whose rank is the sum of theirs.
    ranks = {name: each.r if each.num_experts else each.r * max(1, len(each.pieces)) for name, each in targets.items()}
    r, scaling = max(ranks.values()), one_scaling(f"{folder}", {name: each.scaling for name, each in targets.items()})
    linears = {name: each for name, each in targets.items() if not each.num_experts}
    # Weights of the base that PEFT stores beside.
    written = {key: tensors[key] for key in base_keys(linears, plan).values() if key in tensors}
    for (_, side), key in file_keys(linears).items():
        written[key] = _padded(tensors[key], r, dim="AB".index(side))  # A: [r, in], B: [out, r]
    for rule in plan.experts.values():
        padded = {}
        for name, factors in per_expert.by_projection(rule, full).items():
            padded[name] = ExpertFactors(_padded(factors.a, r, dim=1), _padded(factors.b, r, dim=2))
        if padded:  # LoRA is on this layer's experts
            written |= per_expert.engine_tensors(rule.name, padded, num_experts=rule.num_experts, names=names)
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
    factors = per_expert.engine_factors(file, targets, plan)
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


def _check_no_base(folder: Path, tensors: Collection[str], targets: Collection[str], plan: ModelPlan) -> None:
    """Refuse an embedding or a head of the base in the folder: PEFT loads it, engines do not."""
    for name, key in base_keys(targets, plan).items():
        if name not in targets and key in tensors:
            rule = "it is a weight of the base, which engines do not read"
            raise UnsupportedError(f"{folder}: {key}", rule, "merge it: meshlora merge")


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
