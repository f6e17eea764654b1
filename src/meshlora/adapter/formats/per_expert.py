"""Adapter files with one pair of factors for each expert, as serving engines keep them, in meshlora's words.

Owns: what such a file is about (`engine_config`: its keys say it, whatever patterns its configuration holds) and its
factors (`engine_factors`), with every check. gate and up with the same A to the last bit are one adapter of the fused
matrix, else pieces of it; factors that are the same for every expert of every layer are one that experts share; where
both factors are zero, as engines want them where there is no adapter, there is none.
Does not own: keys and shapes of one layer (`adapter.formats.expert_format`), writing folders
(`adapter.formats.engine_export`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from meshlora.adapter.formats.expert_format import (
    EngineNames,
    ExpertFactors,
    engine_names,
    join_rows,
    read_engine_tensors,
    to_shared,
)
from meshlora.adapter.formats.file_tensors import PREFIX, factors_of_file, file_shapes
from meshlora.adapter.targets.patterns import check_patterns, pattern_key
from meshlora.adapter.targets.pieces import PieceLoraConfig, with_pieces
from meshlora.adapter.targets.resolve import Target
from meshlora.common.errors import UnsupportedError, UserError
from meshlora.common.files import open_safetensors
from meshlora.model.stream import FLOATS
from meshlora.plan.rules import ExpertsRule, ModelPlan

_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.[^.]+\.lora_[AB]\.weight$")
_OF_LINEAR = re.compile(rf"{re.escape(PREFIX)}(?P<name>.+)\.(lora_[AB]\.weight|lora_embedding_[AB])")


def is_per_expert(keys: Iterable[str]) -> bool:
    """Whether a file with these keys has factors of single experts."""
    return any(_OF_ONE_EXPERT.search(key) for key in keys)


def refuse_per_expert(folder: Path, keys: Iterable[str], way_out: str = "first export it with --layout peft") -> None:
    """Of a folder with these `keys`, only one in PEFT's form is taken.

    Raises:
        UserError: it has factors of single experts.
    """
    if is_per_expert(keys):
        raise UserError(
            f"{folder}",
            "it has adapters on single experts, as serving engines keep them, and PEFT has one on their stack",
            f"{way_out} --model FOLDER",
        )


def engine_config(file: Path, config: LoraConfig, plan: ModelPlan) -> LoraConfig:
    """`config`, which stands beside `file`, in PEFT's words for stacks of experts: `target_parameters`, and `pieces`
    and `share_experts` where the factors are such. As it is, where the file has no factors of single experts.

    Raises:
        UserError: the file is damaged, or not of this model. UnsupportedError: engines do not keep this family so, or
            it is more than LoRA of one rank on experts.
    """
    with open_safetensors(file) as opened:
        keys = set(opened.keys())
        if not plan.experts or not is_per_expert(keys):
            return config
        names = engine_names(plan.model_type)
        check_lora_alone(config, f"{file}")
        pieces: dict[str, tuple[str, ...]] = {}
        is_shared = True
        of_experts: set[str] = set()
        for rule, own, found in _layers(opened, file, keys, plan, names):
            of_experts |= own
            for name, parts in _by_projection(rule, found).items():
                pieces[name] = tuple(part for part in parts if part)
            is_shared = is_shared and all(_is_same(stack) for factors in found.values() for stack in factors)
    is_shared = is_shared and bool(pieces)
    linears = _linears(file, keys - of_experts, plan)
    # PEFT takes these names among target_modules for the experts' own.
    taken = {*names.projections.values(), "gate"}
    as_parameters = [name for name in linears if _leaf(name) in taken]
    _check_patterns(file, config, [*pieces, *as_parameters], plan, names)
    short = _short_projections(pieces, plan)
    plain = dataclasses.replace(
        config,
        target_modules=_short_linears([name for name in linears if name not in as_parameters], plan),
        target_parameters=[*short, *(f"{name}.weight" for name in as_parameters)],
        exclude_modules=None,
        layers_to_transform=None,
        layers_pattern=None,
    )
    in_pieces = {name: list(parts) for name, parts in short.items() if parts}
    if not in_pieces and not is_shared:
        return plain
    if in_pieces:
        return dataclasses.replace(with_pieces(plain, in_pieces), share_experts=is_shared)
    values = {f.name: getattr(plain, f.name) for f in dataclasses.fields(LoraConfig) if f.init}
    return PieceLoraConfig(**values, share_experts=True)


def engine_factors(file: Path, targets: Mapping[str, Target], plan: ModelPlan) -> dict[str, dict[str, Tensor]] | None:
    """Target -> part -> whole factor, each checked; None where the file has no factors of single experts.

    Args:
        targets: of `engine_config` of the same file.

    Raises:
        UserError: names, shapes or types that do not fit the model, values not finite.
    """
    linears = {name: target for name, target in targets.items() if not target.num_experts}
    expected = file_shapes(linears)
    found: dict[str, dict[str, Tensor]] = {}
    with open_safetensors(file) as opened:
        keys = set(opened.keys())
        if not plan.experts or not is_per_expert(keys):
            return None
        left = set(keys)
        for rule, own, projections in _layers(opened, file, keys, plan, engine_names(plan.model_type)):
            left -= own
            for name, pieces in _by_projection(rule, projections).items():
                found[name] = _parts(file, targets[name], pieces, targets[name].shapes)
        left -= base_keys(linears, plan)
        if wrong := sorted(left ^ expected.keys()):
            what = "its lora_A and lora_B are not both there" if wrong[0] in expected else "no target has it"
            raise UserError(f"{file}: {wrong[0]}", what, "it is damaged, or belongs to another model")
        tensors = {key: _read(opened, file, key) for key in sorted(left)}
    for key, tensor in tensors.items():
        _check_shape(file, key, tensor, expected[key])
    assert found.keys() | linears.keys() == targets.keys(), (sorted(found), sorted(targets))
    return found | factors_of_file(tensors, linears, file)


def check_lora_alone(config: LoraConfig, where: str) -> None:
    """Refuse what is trained beside LoRA: engines have no place for it. Other kinds of LoRA no experts have.

    Raises:
        UnsupportedError: names the option.
    """
    for option in ("modules_to_save", "bias"):
        value = getattr(config, option)
        if value and value != "none":
            raise UnsupportedError(
                f"{where}: {option}={value!r}", "adapters for serving engines are LoRA and nothing more", "merge it"
            )


def base_keys(targets: Collection[str], plan: ModelPlan) -> set[str]:
    """Where PEFT may store the base's own embedding and head beside the adapters on them."""
    return {f"{PREFIX}{name}.base_layer.weight" for name in (plan.embedding, plan.head) if name in targets}


def _layers(
    opened: Any, file: Path, keys: Collection[str], plan: ModelPlan, names: EngineNames
) -> Iterator[tuple[ExpertsRule, set[str], dict[str, ExpertFactors]]]:
    """(rule, keys, adapters by projection) of every layer whose experts the file is about."""
    for rule in plan.experts.values():
        own = {key for key in keys if key.startswith(f"{names.prefix(rule.name)}.")}
        tensors = {key: _read(opened, file, key) for key in sorted(own)}
        found = read_engine_tensors(tensors, rule.name, num_experts=rule.num_experts, names=names, where=f"{file}")
        if len({factors.a.dtype for factors in found.values()} | {factors.b.dtype for factors in found.values()}) > 1:
            raise UserError(f"{file}: the factors of {rule.name} have several types", "they have one", "convert them")
        yield rule, own, found


def _read(opened: Any, file: Path, key: str) -> Tensor:
    dtype = opened.get_slice(key).get_dtype()
    if dtype not in FLOATS:
        raise UserError(f"{file}: {key}", f"its type is {dtype}", f"it must be one of {', '.join(FLOATS)}")
    tensor: Tensor = opened.get_tensor(key).clone()
    if not torch.isfinite(tensor).all():
        raise UserError(f"{file}: {key}", "it holds values that are not finite", "use an earlier checkpoint")
    return tensor


def _by_projection(rule: ExpertsRule, found: Mapping[str, ExpertFactors]) -> dict[str, dict[str, ExpertFactors]]:
    """Projection of the model -> piece -> its adapter; "" for all of it."""
    by_name = {rule.second.name: {"": found["down"]}} if "down" in found else {}
    first = {projection: factors for projection, factors in found.items() if projection != "down"}
    if first and rule.first.fused is None:
        return by_name | {rule.first.name: {"": first["up"]}}
    if first:
        assert rule.first.fused is not None
        rows = {piece.name: rule.first.fused.piece_rows(piece.name) for piece in rule.first.fused.pieces}
        has_one_a = len({factors.a.shape for factors in first.values()}) == 1
        joined = join_rows(first, rows=rows) if has_one_a else None
        by_name[rule.first.name] = first if joined is None else {"": joined}
    return by_name


def _parts(
    file: Path, target: Target, pieces: Mapping[str, ExpertFactors], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """The factors of one projection by their parts, shared where the target is."""
    assert target.pieces == tuple(piece for piece in pieces if piece), (target, list(pieces))
    parts = {}
    for piece, factors in pieces.items():
        own = to_shared(factors, where=f"{file}: {target.name}") if target.is_shared else factors
        for side, stack in zip("AB", own, strict=True):
            part = f"{side}.{piece}" if piece else side
            _check_shape(file, f"lora_{part} of {target.name}", stack[0], shapes[part][1:])
            parts[part] = stack
    return parts


def _check_shape(file: Path, what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise UserError(
            f"{file}: {what}",
            f"its shape is {list(tensor.shape)}, this model and adapter_config.json need {list(shape)}",
            "it belongs to another model or another rank",
        )


def _is_same(stack: Tensor) -> bool:
    return bool((stack == stack[0]).all())


def _linears(file: Path, keys: Iterable[str], plan: ModelPlan) -> list[str]:
    """Names of the linears, and the embedding, that `keys` are about, in the order of the model."""
    known = [plan.embedding, *plan.linears]
    found = set()
    for key in sorted(keys):
        match = _OF_LINEAR.fullmatch(key)
        if match is not None and match["name"] in known:
            found.add(match["name"])
        elif key not in base_keys(known, plan):
            raise UserError(f"{file}: {key}", "it has no place in this model", "it belongs to another model")
    return [name for name in known if name in found]


def _short_linears(chosen: Collection[str], plan: ModelPlan) -> list[str]:
    """By the last part of their names where that means these alone, else in full."""
    others = {_leaf(name) for name in (plan.embedding, *plan.linears) if name not in chosen}
    short = {name if _leaf(name) in others or _leaf(name).isdecimal() else _leaf(name) for name in chosen}
    return sorted(short)


def _short_projections(pieces: Mapping[str, tuple[str, ...]], plan: ModelPlan) -> dict[str, tuple[str, ...]]:
    """`experts.down_proj` -> pieces, where that means these alone and they are alike, else by full names."""
    found = {}
    for name, parts in pieces.items():
        short = ".".join(name.split(".")[-2:])
        same = [pieces.get(other) for other in plan.projections if other.endswith(f".{short}")]
        found[short if all(each == parts for each in same) else name] = parts
    return found


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _check_patterns(
    file: Path, config: LoraConfig, targets: Iterable[str], plan: ModelPlan, names: EngineNames
) -> None:
    """Engines know one rank and one scale, and for these targets patterns would be about names that change."""
    single = [
        f"{names.prefix(rule.name)}.{expert}.{leaf}".removeprefix(PREFIX)
        for rule in plan.experts.values()
        for expert in range(rule.num_experts)
        for leaf in names.projections.values()
    ]
    check_patterns(config, [*single, *targets])
    for option in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, option)
        for name in (*single, *targets) if pattern else ():
            if pattern_key(pattern, name) in pattern:
                raise UnsupportedError(
                    f"{file}: {option}={pattern}", f"it is about {name}, and adapters on single experts have one rank"
                )
