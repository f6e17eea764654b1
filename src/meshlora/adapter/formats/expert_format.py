"""Adapters on routed experts as files hold them: PEFT's fused form, and one pair of factors for each expert.

Owns: shapes, order and keys, both ways, of the adapters of one layer's experts; the block form of those on gate or up
alone. Does not own: files and folders (`adapter.formats.peft_format`), which parameters are targets, how experts are
split.

Ours, for a projection of E experts: A `[E, r, in]` on the input side, B `[E, out, r]` on the output side; one adapter
that all experts of a layer share has E = 1 (either side may). gate and up in one matrix are one projection, or two
pieces, each with an A and a B of its own, the rows of each in the fused `out` given as an index.

PEFT's (`ParamWrapper`, peft/tuners/lora/layer.py): A `[r*E, in]`, the expert the slow index; B `[out, r*E]`, the expert
the *fast* one. It calls the dims of a parameter in and out by the attribute `is_transposed` of its module: where a
parameter is stored `[E, in, out]` and the module does not say so (llama4), its A is on the output side: swapped.

Serving engines (vLLM's 2-D form): A `[r, in]`, B `[out, r]` for each of gate, up and down of each expert.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshlora.common.errors import UnsupportedError, UserError, did_you_mean

_PREFIX = "base_model.model."
# In the order in which modules of experts register them: PEFT wraps the first one first, innermost.
_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
_KEY = re.compile(rf"{re.escape(_PREFIX)}(?P<experts>.+?)(?P<nested>(\.base_layer)*)\.lora_(?P<side>[AB])\.weight")


class ExpertFactors(NamedTuple):
    """The adapter of one projection: a `[E, r, in]`, b `[E, out, r]`; E = 1: all experts share it."""

    a: Tensor
    b: Tensor


def to_peft(a: Tensor, b: Tensor, *, num_experts: int, is_swapped: bool = False) -> tuple[Tensor, Tensor]:
    """PEFT's A `[r*E, in]` and B `[out, r*E]`; swapped: A `[r*E, out]` and B `[in, r*E]`.

    A shared side is repeated for every expert: PEFT knows no other.
    """
    r = a.shape[1]
    assert b.shape[2] == r, (a.shape, b.shape)
    assert {len(a), len(b)} <= {1, num_experts}, (a.shape, b.shape, num_experts)
    a, b = a.expand(num_experts, -1, -1), b.expand(num_experts, -1, -1)
    if is_swapped:
        a, b = b.mT, a.mT
    # [E, r, in] -> [E*r, in] and [E, out, r] -> [out, r, E] -> [out, r*E]; clones: files hold no tensor twice.
    return a.reshape(num_experts * r, -1).clone(), b.permute(1, 2, 0).reshape(-1, r * num_experts).clone()


def from_peft(
    a: Tensor,
    b: Tensor,
    *,
    num_experts: int,
    is_swapped: bool = False,
    is_shared: bool = False,
    where: str = "adapter on experts",
) -> ExpertFactors:
    """The inverse of `to_peft`, in memory of its own.

    Args:
        is_shared: one adapter for all experts, E = 1.
        where: names the file and the parameter in messages.

    Raises:
        UserError: the shapes are not those of `num_experts` adapters, or those of a shared one are not the same.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or a.shape[0] % num_experts:
        raise UserError(
            f"{where}: lora_A {list(a.shape)}, lora_B {list(b.shape)}",
            f"for {num_experts} experts they are [r * {num_experts}, in] and [out, r * {num_experts}]",
            "it belongs to another model",
        )
    a = a.reshape(num_experts, -1, a.shape[1])  # [E, r, in]
    b = b.reshape(len(b), -1, num_experts).permute(2, 0, 1)  # [E, out, r]
    if is_swapped:
        a, b = b.mT, a.mT
    factors = ExpertFactors(
        a.clone(memory_format=torch.contiguous_format), b.clone(memory_format=torch.contiguous_format)
    )
    return to_shared(factors, where=where) if is_shared else factors


def to_shared(factors: ExpertFactors, *, where: str = "adapter on experts") -> ExpertFactors:
    """The one adapter, E = 1, that is that of every expert to the last bit.

    Raises:
        UserError: experts have different ones; names the first that differs.
    """
    for side, stack in zip("AB", factors, strict=True):
        if differs := [e for e in range(len(stack)) if not torch.equal(stack[e], stack[0])]:
            raise UserError(
                f"{where}: lora_{side} of expert {differs[0]} is not that of expert 0",
                "an adapter that experts share is the same for all of them to the last bit",
                "load it as one adapter for each expert",
            )
    return ExpertFactors(factors.a[:1].clone(), factors.b[:1].clone())


def to_blocks(pieces: Mapping[str, ExpertFactors], *, rows: Mapping[str, Tensor], out_features: int) -> ExpertFactors:
    """One adapter of the fused matrix from those of its pieces, in their order.

    For each expert: A is the stack of theirs, `[sum of r, in]`; B `[out, sum of r]` is zero but for the rows of each
    piece in its columns.

    Args:
        rows: piece -> where its rows lie in the fused `out`: `[gate | up]` or interleaved.
    """
    num_experts = max(len(each) for factors in pieces.values() for each in factors)
    a, b = [], []
    for name, piece in pieces.items():
        a.append(piece.a.expand(num_experts, -1, -1))
        whole = piece.b.new_zeros(num_experts, out_features, piece.b.shape[2])
        b.append(whole.index_copy(1, rows[name], piece.b.expand(num_experts, -1, -1)))
    return ExpertFactors(torch.cat(a, 1), torch.cat(b, 2))


def from_blocks(
    factors: ExpertFactors, *, pieces: Sequence[str], rows: Mapping[str, Tensor], where: str = "adapter on experts"
) -> dict[str, ExpertFactors]:
    """The inverse of `to_blocks` for pieces of the same rank.

    Raises:
        UserError: the rank is not that of so many pieces, or B is not zero outside its blocks.
    """
    a, b = factors
    if a.shape[1] % len(pieces):
        raise UserError(
            f"{where}: rank {a.shape[1]}", f"it is not {len(pieces)} times the rank of one of {list(pieces)}"
        )
    r = a.shape[1] // len(pieces)
    found = {}
    for index, name in enumerate(pieces):
        columns = slice(index * r, (index + 1) * r)
        found[name] = ExpertFactors(a[:, columns].clone(), b[:, rows[name], columns].clone())
    if not torch.equal(to_blocks(found, rows=rows, out_features=b.shape[1]).b, b):
        raise UserError(
            f"{where}: lora_B",
            f"it is not zero outside the pieces {list(pieces)}",
            "load it as one adapter of the whole matrix",
        )
    return found


def peft_keys(experts: str, targeted: Iterable[str]) -> dict[tuple[str, str], str]:
    """(parameter, "A" or "B") -> key in PEFT's file, for the targeted parameters of one module of experts.

    PEFT wraps the module once for each target; the last one is outermost and has the plain name. So the key of one
    parameter depends on which others are targets, whatever their order in `target_parameters`:

        both           experts.base_layer.lora_A = gate_up_proj    experts.lora_A = down_proj
        one of them    experts.lora_A

    Raises:
        UnsupportedError: a parameter that is no projection.
    """
    ordered = _in_order(experts, targeted)
    return {
        (name, side): f"{_PREFIX}{experts}{'.base_layer' * (len(ordered) - 1 - index)}.lora_{side}.weight"
        for index, name in enumerate(ordered)
        for side in "AB"
    }


def parameter_of_key(key: str, targeted: Mapping[str, Collection[str]]) -> tuple[str, str]:
    """The inverse of `peft_keys`: (full name of the parameter, "A" or "B").

    Args:
        targeted: module of experts -> its targeted parameters.

    Raises:
        UserError: the key is none of an adapter on these parameters.
    """
    found = _KEY.fullmatch(key)
    if found is None or found["experts"] not in targeted:
        known = [each for name, own in targeted.items() for each in peft_keys(name, own).values()]
        raise UserError(f"{key}", "it is no adapter of experts that are targets", did_you_mean(key, known))
    experts, depth = found["experts"], found["nested"].count(".base_layer")
    ordered = _in_order(experts, targeted[experts])
    if depth >= len(ordered):
        raise UserError(
            f"{key}",
            f"it is that of one more parameter than the targets {ordered} of {experts}",
            "target_parameters of adapter_config.json do not belong to this file",
        )
    return f"{experts}.{ordered[len(ordered) - 1 - depth]}", found["side"]


def _in_order(experts: str, targeted: Iterable[str]) -> list[str]:
    targeted = set(targeted)
    if unknown := sorted(targeted - set(_PARAMETERS)):
        raise UnsupportedError(
            f"target_parameters: {experts}.{unknown[0]}",
            f"of experts, these can be targets: {', '.join(_PARAMETERS)}",
            did_you_mean(unknown[0], _PARAMETERS),
        )
    return [name for name in _PARAMETERS if name in targeted]


@dataclass(frozen=True)
class EngineNames:
    """How serving engines call the projections of one expert, as the family's first checkpoints did.

    Attributes:
        gate: empty where experts have none.
        block: the name there of the module around `experts`; empty: that of transformers.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    block: str = ""

    @property
    def projections(self) -> dict[str, str]:
        """Which it is ("gate", "up", "down") -> name."""
        names = {"gate": self.gate, "up": self.up, "down": self.down}
        return {projection: name for projection, name in names.items() if name}

    def prefix(self, experts: str) -> str:
        """`model.layers.0.mlp.experts` -> what comes before the number of an expert."""
        parent, _, leaf = experts.rpartition(".")
        above, _, block = parent.rpartition(".")
        return f"{_PREFIX}{above}.{self.block or block}.{leaf}"


_MIXTRAL = EngineNames("w1", "w3", "w2", block="block_sparse_moe")
# As their checkpoints do, which vLLM follows (`get_expert_mapping` in vllm/model_executor/models/<family>.py).
_ENGINE_NAMES = {
    **dict.fromkeys(("mixtral", "minimax_m2", "phimoe"), _MIXTRAL),
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "dots1",
            "ernie4_5_moe",
            "flex_olmo",
            "glm4_moe",
            "hunyuan_v1_moe",
            "olmoe",
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
        ),
        EngineNames(),
    ),
    "nemotron_h": EngineNames(gate=""),
}
# vLLM's `is_3d_moe_weight`: it reads PEFT's fused form for these, and by default nothing else.
_FUSED = {"gpt_oss", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe", "qwen3_vl_moe_text"}


def engine_names(model_type: str) -> EngineNames:
    """The names of one expert's projections in `model_type`.

    Raises:
        UnsupportedError: serving engines read PEFT's own form for it, or what they call them is not known.
    """
    if model_type in _FUSED:
        raise UnsupportedError(
            f"one adapter for each expert of {model_type!r}",
            "serving engines read the experts of this family in PEFT's form",
            "serve the adapter as it is",
        )
    if model_type not in _ENGINE_NAMES:
        raise UnsupportedError(
            f"one adapter for each expert of {model_type!r}",
            "it is not known what serving engines call its projections",
            f"known: {', '.join(sorted(_ENGINE_NAMES))}",
        )
    return _ENGINE_NAMES[model_type]


def split_rows(fused: ExpertFactors, *, rows: Mapping[str, Tensor]) -> dict[str, ExpertFactors]:
    """gate and up from their one adapter: the same A, the rows of B of each."""
    return {name: ExpertFactors(fused.a, fused.b[:, index]) for name, index in rows.items()}


def join_rows(pieces: Mapping[str, ExpertFactors], *, rows: Mapping[str, Tensor]) -> ExpertFactors | None:
    """The inverse of `split_rows`; None where one has no adapter or not the A of the other to the last bit: pieces."""
    if not rows.keys() <= pieces.keys():
        return None
    first = pieces[next(iter(rows))]
    if not all(torch.equal(pieces[name].a, first.a) for name in rows):
        return None
    b = first.b.new_empty(len(first.b), sum(len(index) for index in rows.values()), first.b.shape[2])
    for name, index in rows.items():
        b[:, index] = pieces[name].b
    return ExpertFactors(first.a.clone(), b)


def engine_tensors(
    experts: str, projections: Mapping[str, ExpertFactors], *, num_experts: int, names: EngineNames
) -> dict[str, Tensor]:
    """Keys and tensors for serving engines, from the adapters on "gate", "up" and "down" of one layer's experts.

    Engines take all projections of an expert or none: one that has no adapter gets factors that are zero.

    Args:
        experts: name of the module, `model.layers.0.mlp.experts`.
        projections: all of the same rank, those in `names` or some of them; gate and up by `split_rows`.
    """
    assert {*projections} <= {*names.projections}, (list(projections), names)
    assert len({factors.a.shape[1] for factors in projections.values()}) == 1, "engines know one rank"
    tensors = {}
    for projection, name in names.projections.items():
        factors = projections.get(projection) or _zeros(projection, projections)
        for side, stack in zip("AB", factors, strict=True):
            for e, matrix in enumerate(stack.expand(num_experts, -1, -1)):
                key = f"{names.prefix(experts)}.{e}.{name}.lora_{side}.weight"
                tensors[key] = matrix.clone(memory_format=torch.contiguous_format)
    return tensors


def read_engine_tensors(
    tensors: Mapping[str, Tensor], experts: str, *, num_experts: int, names: EngineNames, where: str = "adapter"
) -> dict[str, ExpertFactors]:
    """The inverse of `engine_tensors`: the adapters of "gate", "up" and "down" that are there, E = num_experts.

    Args:
        tensors: all of a file, or more than those of this layer.

    Raises:
        UserError: factors of some experts or sides are missing, too many, or differ in shape.
    """
    prefix = f"{names.prefix(experts)}."
    left = {key for key in tensors if key.startswith(prefix)}
    found = {}
    for projection, name in names.projections.items():
        keys = [[f"{prefix}{e}.{name}.lora_{side}.weight" for e in range(num_experts)] for side in "AB"]
        present = left & {key for side in keys for key in side}
        if not present:
            continue
        stacks = [_stack(tensors, side, where) for side in keys]
        left -= present
        factors = ExpertFactors(*stacks)
        if factors.a.ndim != 3 or factors.b.ndim != 3 or factors.a.shape[1] != factors.b.shape[2]:
            raise UserError(
                f"{where}: {keys[0][0]} {list(factors.a.shape[1:])}, lora_B {list(factors.b.shape[1:])}",
                "they are [r, in] and [out, r]",
            )
        if factors.a.any() or factors.b.any():  # no training leaves both zero: neither would ever have a gradient
            found[projection] = factors
    if left:
        raise UserError(
            f"{where}: {min(left)}",
            f"{experts} has {num_experts} experts with {', '.join(names.projections.values())}",
            "it belongs to another model",
        )
    return found


def _zeros(projection: str, projections: Mapping[str, ExpertFactors]) -> ExpertFactors:
    """Factors that add nothing, in the shapes that the other projections say: down leads back from gate and up."""
    other, (a, b) = next(iter(projections.items()))
    r, before, after = a.shape[1], a.shape[2], b.shape[1]
    if (projection == "down") != (other == "down"):
        before, after = after, before
    return ExpertFactors(a.new_zeros(1, r, before), b.new_zeros(1, after, r))


def _stack(tensors: Mapping[str, Tensor], keys: Sequence[str], where: str) -> Tensor:
    if missing := [key for key in keys if key not in tensors]:
        raise UserError(
            f"{where}", f"it lacks {len(missing)} of {len(keys)} experts' factors, first {missing[0]}", "it is damaged"
        )
    first = tensors[keys[0]]
    for key in keys:
        if (tensors[key].shape, tensors[key].dtype) != (first.shape, first.dtype):
            raise UserError(
                f"{where}: {key} is {list(tensors[key].shape)} {tensors[key].dtype}",
                f"{keys[0]} is {list(first.shape)} {first.dtype}, and all experts of a layer have one shape and type",
            )
    return torch.stack([tensors[key] for key in keys])
