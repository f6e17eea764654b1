"""Adapter files with one pair of factors per expert, as serving engines keep them.

Owns: keys and shapes of the adapters of one layer's experts, both ways (vLLM's 2-D form: A `[r, in]`, B `[out, r]` for
each of gate, up and down of each expert); the targets of such a file (`engine_config`: from its keys, whatever patterns
its configuration holds) and its factors (`engine_factors`), all checked. gate and up with bitwise equal A are one
adapter of the fused matrix, else pieces of it; factors equal for all experts of all layers are a shared adapter; zero
factors, which engines want in place of a missing adapter, are none. Does not own: writing folders
(`meshlora_extra.engine_export`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from meshlora.adapter.formats.adapter_file import PREFIX, check_shape, open_adapter, read_tensor
from meshlora.adapter.formats.file_tensors import ExpertFactors, base_keys, factors_of_file, file_shapes, to_shared
from meshlora.adapter.targets.options import check_patterns, pattern_key
from meshlora.adapter.targets.pieces import with_own_words, with_pieces
from meshlora.adapter.targets.resolve import Target
from meshlora.plan.rules import ExpertsRule, ModelPlan
from meshlora_ground.errors import UnsupportedError, UserError

_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.[^.]+\.lora_[AB]\.weight$")
_OF_LINEAR = re.compile(rf"{re.escape(PREFIX)}(?P<name>.+)\.(lora_[AB]\.weight|lora_embedding_[AB])")


@dataclass(frozen=True)
class EngineNames:
    """The names of one expert's projections in serving engines: those of the family's original checkpoints.

    Attributes:
        gate: empty for experts without one.
        block: the engine's name of the module around `experts`; empty: as in transformers.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    block: str = ""

    @property
    def projections(self) -> dict[str, str]:
        """Projection ("gate", "up" or "down") -> name."""
        names = {"gate": self.gate, "up": self.up, "down": self.down}
        return {projection: name for projection, name in names.items() if name}

    def prefix(self, experts: str) -> str:
        """`model.layers.0.mlp.experts` -> the key prefix before an expert's number."""
        parent, _, leaf = experts.rpartition(".")
        above, _, block = parent.rpartition(".")
        return f"{PREFIX}{above}.{self.block or block}.{leaf}"

    def keys(self, experts: str, projection: str, num_experts: int) -> dict[str, list[str]]:
        """Side ("A", "B") -> the keys of one projection, in expert order."""
        start, name = self.prefix(experts), self.projections[projection]
        found = {}
        for side in "AB":
            found[side] = [f"{start}.{e}.{name}.lora_{side}.weight" for e in range(num_experts)]
        return found


_MIXTRAL = EngineNames("w1", "w3", "w2", block="block_sparse_moe")
# vLLM follows the checkpoints (`get_expert_mapping` in vllm/model_executor/models/<family>.py).
ENGINE_NAMES = {
    **dict.fromkeys(("mixtral", "minimax_m2", "phimoe"), _MIXTRAL),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe"), EngineNames()),
    **dict.fromkeys(("hunyuan_v1_moe", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"), EngineNames()),
    "nemotron_h": EngineNames(gate=""),
}
# vLLM's `is_3d_moe_weight`: for these it reads PEFT's fused form, and by default no other.
FUSED = {"gpt_oss", "qwen3_5_moe", "qwen3_vl_moe"}
# Their text classes have no such mark, and in the composites' no module of their names: the base would answer.
TEXT_CLASSES = {f"{family}_text": family for family in ("qwen3_5_moe", "qwen3_vl_moe")}


def reads_fused_experts(model_type: str) -> bool:
    """Whether engines read adapters on the experts of `model_type` in PEFT's form.

    Raises:
        UnsupportedError: they read them in neither form.
    """
    if model_type in TEXT_CLASSES:
        given = f"an adapter on experts of {model_type!r}, for serving engines"
        rule = f"engines apply it to {TEXT_CLASSES[model_type]!r} alone, the class with images"
        raise UnsupportedError(given, rule, "train that one, or merge it: meshlora merge")
    return model_type in FUSED


def engine_names(model_type: str) -> EngineNames:
    """The names of one expert's projections in `model_type`.

    Raises:
        UnsupportedError: engines read PEFT's own form for this family, or their names are not known.
    """
    if reads_fused_experts(model_type):
        rule = "serving engines read the experts of this family in PEFT's form"
        raise UnsupportedError(f"one adapter for each expert of {model_type!r}", rule, "serve the adapter as it is")
    if model_type not in ENGINE_NAMES:
        given = f"one adapter for each expert of {model_type!r}"
        rule = "it is not known what serving engines call its projections"
        raise UnsupportedError(given, rule, f"known: {', '.join(sorted(ENGINE_NAMES))}")
    return ENGINE_NAMES[model_type]


def engine_tensors(
    experts: str, projections: Mapping[str, ExpertFactors], *, num_experts: int, names: EngineNames
) -> dict[str, Tensor]:
    """Keys and tensors for serving engines, from the adapters on "gate", "up" and "down" of one layer's experts.

    Engines need all projections of an expert or none: those without an adapter get zero factors.

    Args:
        experts: name of the module, `model.layers.0.mlp.experts`.
        projections: some or all of those in `names`, all of one rank; gate and up from `split_rows`.
    """
    assert {*projections} <= {*names.projections}, (list(projections), names)
    assert len({factors.a.shape[1] for factors in projections.values()}) == 1, "engines know one rank"
    tensors = {}
    for projection in names.projections:
        factors = projections.get(projection) or _zeros(projection, projections)
        keys = names.keys(experts, projection, num_experts).values()
        for of_side, stack in zip(keys, factors, strict=True):
            for key, matrix in zip(of_side, stack.expand(num_experts, -1, -1), strict=True):
                # Of its own memory: safetensors stores no two tensors that share some.
                tensors[key] = matrix.clone(memory_format=torch.contiguous_format)
    return tensors


def read_engine_tensors(
    tensors: Mapping[str, Tensor], experts: str, *, num_experts: int, names: EngineNames, where: str
) -> dict[str, ExpertFactors]:
    """The inverse of `engine_tensors`: the nonzero adapters of "gate", "up" and "down", E = num_experts.

    Args:
        tensors: those of this layer; others are ignored. where: begins a message.

    Raises:
        UserError: factors of some experts or sides are missing, unexpected, or differ in shape or type.
    """
    # What no projection takes is named: a file of a model with more experts has such keys.
    left = {key for key in tensors if key.startswith(f"{names.prefix(experts)}.")}
    found, types = {}, set[torch.dtype]()
    for projection in names.projections:
        keys = names.keys(experts, projection, num_experts)
        present = left.intersection(keys["A"] + keys["B"])
        if not present:
            continue
        left -= present
        factors = ExpertFactors(_stack(tensors, keys["A"], where), _stack(tensors, keys["B"], where))
        if factors.a.ndim != 3 or factors.b.ndim != 3 or factors.a.shape[1] != factors.b.shape[2]:
            given = f"{where}: {keys['A'][0]} {list(factors.a.shape[1:])}, lora_B {list(factors.b.shape[1:])}"
            raise UserError(given, "they are [r, in] and [out, r]")
        if factors.a.any() or factors.b.any():  # training never leaves both zero: neither would ever get a gradient
            found[projection] = factors
            types |= {factors.a.dtype, factors.b.dtype}
    if left:
        rule = f"{experts} has {num_experts} experts with {', '.join(names.projections.values())}"
        raise UserError(f"{where}: {min(left)}", rule, "it belongs to another model")
    if len(types) > 1:
        raise UserError(f"{where}: the factors of {experts} have several types", "they have one", "convert them")
    return found


def split_rows(fused: ExpertFactors, *, rows: Mapping[str, Tensor]) -> dict[str, ExpertFactors]:
    """The adapters of gate and up from that of the fused matrix: the same A, each its rows of B."""
    return {name: ExpertFactors(fused.a, fused.b[:, index]) for name, index in rows.items()}


def join_rows(pieces: Mapping[str, ExpertFactors], *, rows: Mapping[str, Tensor]) -> ExpertFactors | None:
    """The inverse of `split_rows`; None if one is missing or the two A are not bitwise equal."""
    if not rows.keys() <= pieces.keys():
        return None
    first = pieces[next(iter(rows))]
    for name in rows:
        if not torch.equal(pieces[name].a, first.a):
            return None
    # gate and up may alternate: each goes to rows of its own, in whatever order they are.
    b = first.b.new_empty(len(first.b), sum(len(index) for index in rows.values()), first.b.shape[2])
    for name, index in rows.items():
        b[:, index] = pieces[name].b
    return ExpertFactors(first.a.clone(), b)


def by_projection(rule: ExpertsRule, parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, ExpertFactors]:
    """The adapters of one layer's experts by "gate", "up" and "down". parts: target -> part -> factor."""
    found: dict[str, ExpertFactors] = {}
    for projection, name in ((rule.first, "up"), (rule.second, "down")):
        own = parts.get(projection.name, {})
        for part in sorted(own):
            side, _, piece = part.partition(".")
            if side == "A" and piece:
                found[piece] = ExpertFactors(own[part], own[f"B.{piece}"])
        if "A" not in own:
            continue
        whole = ExpertFactors(own["A"], own["B"])
        if projection.fused is None:
            found[name] = whole
        else:
            found |= split_rows(whole, rows=_rows(rule))
    return found


def _by_target(rule: ExpertsRule, found: Mapping[str, ExpertFactors]) -> dict[str, dict[str, ExpertFactors]]:
    """The inverse of `by_projection`: projection of the model -> piece ("" for all of it) -> its adapter."""
    first, targets = dict(found), {}
    if "down" in first:
        targets[rule.second.name] = {"": first.pop("down")}
    if not first:
        return targets
    joined = first.get("up")
    if rule.first.fused is not None:
        joined = join_rows(first, rows=_rows(rule))
    # Other A for gate and up: one adapter each, on pieces of the fused matrix.
    targets[rule.first.name] = first
    if joined is not None:
        targets[rule.first.name] = {"": joined}
    return targets


def _rows(rule: ExpertsRule) -> dict[str, Tensor]:
    """Indices of the rows of "gate" and "up" in the fused matrix."""
    assert rule.first.fused is not None, rule
    return {piece.name: rule.first.fused.piece_rows(piece.name) for piece in rule.first.fused.pieces}


def _zeros(projection: str, projections: Mapping[str, ExpertFactors]) -> ExpertFactors:
    """Zero factors, shaped from another projection: down maps back from the outputs of gate and up."""
    other, (a, b) = next(iter(projections.items()))
    r, before, after = a.shape[1], a.shape[2], b.shape[1]  # one expert for all: it is expanded
    if (projection == "down") != (other == "down"):
        before, after = after, before
    return ExpertFactors(a.new_zeros(1, r, before), b.new_zeros(1, after, r))


def _stack(tensors: Mapping[str, Tensor], keys: Sequence[str], where: str) -> Tensor:
    if missing := [key for key in keys if key not in tensors]:
        rule = f"it lacks {len(missing)} of {len(keys)} experts' factors, first {missing[0]}"
        raise UserError(f"{where}", rule, "it is damaged")
    first = tensors[keys[0]]
    for key in keys:
        if (tensors[key].shape, tensors[key].dtype) != (first.shape, first.dtype):
            rule = f"{keys[0]} is {list(first.shape)} {first.dtype}, and all experts of a layer have one shape and type"
            raise UserError(f"{where}: {key} is {list(tensors[key].shape)} {tensors[key].dtype}", rule)
    return torch.stack([tensors[key] for key in keys])


def is_per_expert(keys: Iterable[str]) -> bool:
    """Whether any of `keys` belongs to a single expert."""
    return any(_OF_ONE_EXPERT.search(key) for key in keys)


def refuse_per_expert(folder: Path, keys: Iterable[str], way_out: str = "first export it with --layout peft") -> None:
    """Refuse a folder with factors of single experts: only PEFT's form is accepted.

    Raises:
        UserError: some of `keys` belong to single experts.
    """
    if is_per_expert(keys):
        rule = "it has adapters on single experts, as serving engines keep them, and PEFT has one on their stack"
        raise UserError(f"{folder}", rule, f"{way_out} --model FOLDER")


def engine_config(file: Path, config: LoraConfig, plan: ModelPlan) -> LoraConfig:
    """The `config` stored with `file` rewritten for stacks of experts: `target_parameters`, and `pieces` and
    `share_experts` as the factors imply. Unchanged if the file has no factors of single experts.

    Raises:
        UserError: the file is damaged, or of another model. UnsupportedError: engines use another form for this family,
            or the adapter is more than LoRA of one rank on experts.
    """
    with open_adapter(file) as opened:
        keys = opened.keys()
        if not plan.experts or not is_per_expert(keys):
            return config
        names = engine_names(plan.model_type)
        check_lora_alone(config, f"{file}")
        pieces: dict[str, tuple[str, ...]] = {}
        is_shared = True
        of_experts: set[str] = set()
        for own, found in _layers(opened, file, keys, plan, names):
            of_experts |= own
            for name, parts in found.items():
                pieces[name] = tuple(part for part in parts if part)
                for factors in parts.values():
                    is_shared = is_shared and _is_same(factors.a) and _is_same(factors.b)
    is_shared = is_shared and bool(pieces)  # without experts the option would be refused
    linears = _linears(file, keys - of_experts, plan)
    # PEFT takes these names in target_modules for the experts' projections.
    taken = {*names.projections.values(), "gate"}
    modules, as_parameters = [], []
    for name in linears:
        if _leaf(name) in taken:
            as_parameters.append(name)
        else:
            modules.append(name)
    _check_patterns(file, config, [*pieces, *as_parameters], plan, names)
    short = _short_projections(pieces, plan)
    plain = dataclasses.replace(
        config,
        target_modules=_short_linears(modules, plan),
        target_parameters=[*short, *(f"{name}.weight" for name in as_parameters)],
        exclude_modules=None,
        layers_to_transform=None,
        layers_pattern=None,
    )
    in_pieces = {name: list(parts) for name, parts in short.items() if parts}
    return with_own_words(with_pieces(plain, in_pieces), share_experts=is_shared)


def engine_factors(file: Path, targets: Mapping[str, Target], plan: ModelPlan) -> dict[str, dict[str, Tensor]] | None:
    """Target -> part -> full factor, checked; None if the file has no factors of single experts.

    Args:
        targets: resolved from the `engine_config` of the same file.

    Raises:
        UserError: names, shapes or types do not fit the model, or values are not finite.
    """
    found: dict[str, dict[str, Tensor]] = {}
    with open_adapter(file) as opened:
        keys = opened.keys()
        if not plan.experts or not is_per_expert(keys):
            return None
        linears = {name: target for name, target in targets.items() if not target.num_experts}
        expected = file_shapes(linears)
        left = keys - {*base_keys(linears, plan).values()}
        for own, projections in _layers(opened, file, keys, plan, engine_names(plan.model_type)):
            left -= own
            for name, pieces in projections.items():
                found[name] = _parts(file, targets[name], pieces)
        if wrong := sorted(left ^ expected.keys()):
            what = "no target has it"
            if wrong[0] in expected:
                what = "its lora_A and lora_B are not both there"
            raise UserError(f"{file}: {wrong[0]}", what, "it is damaged, or belongs to another model")
        tensors = {key: read_tensor(opened, file, key, expected[key]) for key in sorted(left)}
    assert found.keys() | linears.keys() == targets.keys(), (sorted(found), sorted(targets))
    return found | factors_of_file(tensors, linears, file)


def check_lora_alone(config: LoraConfig, where: str) -> None:
    """Refuse parameters trained besides LoRA, which engines cannot hold; other kinds of LoRA never apply to experts.

    Raises:
        UnsupportedError: names the option.
    """
    for option in ("modules_to_save", "bias", "trainable_token_indices"):
        value = getattr(config, option)
        if value and value != "none":
            rule = "adapters for serving engines are LoRA and nothing more"
            raise UnsupportedError(f"{where}: {option}={value!r}", rule, "merge it")


def _layers(
    opened: Any, file: Path, keys: Collection[str], plan: ModelPlan, names: EngineNames
) -> Iterator[tuple[set[str], dict[str, dict[str, ExpertFactors]]]]:
    """(keys, projection of the model -> piece -> adapter) of every layer with experts."""
    for rule in plan.experts.values():
        own = {key for key in keys if key.startswith(f"{names.prefix(rule.name)}.")}
        tensors = {key: read_tensor(opened, file, key) for key in sorted(own)}
        found = read_engine_tensors(tensors, rule.name, num_experts=rule.num_experts, names=names, where=f"{file}")
        yield own, _by_target(rule, found)


def _parts(file: Path, target: Target, pieces: Mapping[str, ExpertFactors]) -> dict[str, Tensor]:
    """The factors of one projection by part, reduced to one expert if the target is shared."""
    assert target.pieces == tuple(piece for piece in pieces if piece), (target, list(pieces))
    parts = {}
    for piece, factors in pieces.items():
        own = factors
        if target.is_shared:
            own = to_shared(factors, where=f"{file}: {target.name}")
        for side, stack in zip("AB", own, strict=True):
            part = side
            if piece:
                part = f"{side}.{piece}"
            check_shape(file, f"lora_{part} of {target.name}", tuple(stack.shape[1:]), target.shapes[part][1:])
            parts[part] = stack
    return parts


def _is_same(stack: Tensor) -> bool:
    return bool((stack == stack[0]).all())


def _linears(file: Path, keys: Iterable[str], plan: ModelPlan) -> list[str]:
    """Names of the linears and the embedding that `keys` belong to, in model order."""
    known = [plan.embedding, *plan.linears]
    found = set()
    for key in sorted(keys):  # so that an error names the same key each time
        match = _OF_LINEAR.fullmatch(key)
        if match is not None and match["name"] in known:
            found.add(match["name"])
        elif key not in base_keys(known, plan).values():
            raise UserError(f"{file}: {key}", "it has no place in this model", "it belongs to another model")
    return [name for name in known if name in found]


def _short_linears(chosen: Collection[str], plan: ModelPlan) -> list[str]:
    """The last parts of the names if unambiguous, else full names."""
    others = {_leaf(name) for name in (plan.embedding, *plan.linears) if name not in chosen}
    short = set()
    for name in chosen:
        leaf = _leaf(name)
        if leaf in others or leaf.isdecimal():  # a number in a list of modules says nothing by itself
            leaf = name
        short.add(leaf)
    return sorted(short)


def _short_projections(pieces: Mapping[str, tuple[str, ...]], plan: ModelPlan) -> dict[str, tuple[str, ...]]:
    """`experts.down_proj` -> pieces, if all such projections have the same pieces, else by full names."""
    found = {}
    for name, parts in pieces.items():
        short = ".".join(name.split(".")[-2:])
        # None of one without an adapter, which the short name would match too.
        of_short = {pieces.get(other) for other in plan.projections if other.endswith(f".{short}")}
        if of_short != {parts}:
            short = name
        found[short] = parts
    return found


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _check_patterns(
    file: Path, config: LoraConfig, targets: Iterable[str], plan: ModelPlan, names: EngineNames
) -> None:
    """Refuse patterns on these targets: engines have one rank and one scale, and the names change."""
    every = []
    for rule in plan.experts.values():
        start = names.prefix(rule.name).removeprefix(PREFIX)
        for expert in range(rule.num_experts):
            every += [f"{start}.{expert}.{leaf}" for leaf in names.projections.values()]
    every += targets
    check_patterns(config, every)
    for option in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, option)
        if not pattern:  # of thousands of names
            continue
        for name in every:
            if pattern_key(pattern, name) in pattern:
                given = f"{file}: {option}={pattern}"
                raise UnsupportedError(given, f"it is about {name}, and adapters on single experts have one rank")
