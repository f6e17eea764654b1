"""The tensors of a PEFT adapter file: keys, shapes, and conversion from and to factors.

Owns: the mapping between full factors of targets and the tensors of `adapter_model.safetensors`: adapters on pieces of
a fused matrix in block form, adapters on experts in PEFT's order. Does not own: reading them
(`adapter.formats.adapter_file`), the folder (`adapter.formats.peft_format`), the targets (`adapter.targets.resolve`),
one pair of factors per expert (`wings.experts.per_expert`).

Ours, for a projection of E experts: A `[E, r, in]` on the input side, B `[E, out, r]` on the output side; E = 1 for an
adapter (or one side of it) shared by all experts of a layer. A fused gate_up matrix is one projection, or two pieces,
each with its own A and B, whose rows in the fused `out` are given as an index.

PEFT's (`ParamWrapper`, peft/tuners/lora/layer.py): A `[r*E, in]` with the expert as slow index, B `[out, r*E]` with the
expert as *fast* index. PEFT infers in and out from the module's attribute `is_transposed`: if a parameter is stored
`[E, in, out]` and the module does not say so (llama4), PEFT's A is on the output side: swapped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshlora.adapter.formats.adapter_file import PREFIX
from meshlora.adapter.targets.resolve import Target
from meshlora.adapter.targets.token_rows import DELTA
from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import UserError

# In registration order of the experts modules: PEFT wraps the first one first, innermost.
_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")


class ExpertFactors(NamedTuple):
    """The adapter of one projection: a `[E, r, in]`, b `[E, out, r]`; E = 1: shared by the experts, or a linear."""

    a: Tensor
    b: Tensor


def file_tensors(full: Mapping[str, Tensor], targets: Mapping[str, Target]) -> dict[str, Tensor]:
    """Keys and tensors of the file, from the full factors by name."""
    tensors: dict[str, Tensor] = {}
    left = dict(full)
    keys = file_keys(targets)
    for target in targets.values():
        parts = {part: left.pop(target.name_of(part)) for part in target.shapes}
        if target.pieces:
            parts |= _as_one(parts, target)
        if target.num_experts:
            a, b = to_peft(parts["A"], parts["B"], num_experts=target.num_experts, is_swapped=target.is_swapped)
            parts = {"A": a, "B": b}
        for part in _file_parts(target):
            tensors[keys[target.name, part]] = parts[part]
    for name, tensor in left.items():  # of the base: copies and rows
        tensors[key_of_parameter(name, targets)] = tensor
    return tensors


def factors_of_file(
    tensors: Mapping[str, Tensor], targets: Mapping[str, Target], file: Path
) -> dict[str, dict[str, Tensor]]:
    """The inverse of `file_tensors`: target -> part -> full factor.

    Raises:
        UserError: an adapter on pieces is not zero outside them, or a shared one differs between experts.
    """
    keys = file_keys(targets)
    found: dict[str, dict[str, Tensor]] = {}
    for target in targets.values():
        where = f"{file}: {keys[target.name, 'B']}"
        parts = {part: tensors[keys[target.name, part]] for part in _file_parts(target)}
        if target.num_experts:
            factors = from_peft(parts["A"], parts["B"], num_experts=target.num_experts, is_swapped=target.is_swapped)
            if target.is_shared:
                factors = to_shared(factors, where=where)
            parts = {"A": factors.a, "B": factors.b}
        if target.pieces:
            parts = _in_pieces(parts, target, where)
        found[target.name] = parts
    return found


def file_shapes(targets: Mapping[str, Target]) -> dict[str, tuple[int, ...]]:
    """Key -> shape of every tensor of the targets."""
    empty: dict[str, Tensor] = {}  # on the meta device: what converts the factors says what comes out
    for target in targets.values():
        for part, shape in target.shapes.items():
            empty[target.name_of(part)] = torch.empty(shape, device="meta")
    return {key: tuple(tensor.shape) for key, tensor in file_tensors(empty, targets).items()}


def file_keys(targets: Mapping[str, Target]) -> dict[tuple[str, str], str]:
    """(target, "A", "B" or further part) -> key, as in `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`."""
    experts: dict[str, list[str]] = {}
    found: dict[tuple[str, str], str] = {}
    for target in targets.values():
        module, _, leaf = target.name.rpartition(".")
        if target.num_experts:
            experts.setdefault(module, []).append(leaf)
            continue
        for part in _file_parts(target):
            key = f"{PREFIX}{target.name_of(part)}"
            # An nn.Linear's in PEFT; others are parameters.
            if not target.is_embedding and part in ("A", "B"):
                key += ".weight"
            found[target.name, part] = key
    for module, leaves in experts.items():
        for (leaf, side), key in peft_keys(module, leaves).items():
            found[f"{module}.{leaf}", side] = key
    for (name, part), key in found.items():
        found[name, part] = key.replace(*targets[name].in_file, 1)
    return found


def peft_keys(experts: str, targeted: Collection[str]) -> dict[tuple[str, str], str]:
    """(parameter, "A" or "B") -> key in PEFT's file, for the targeted parameters of one experts module.

    PEFT wraps the module once per target; the last one is outermost and has the plain name. So the key of a parameter
    depends on which others are targets, but not on their order in `target_parameters`:

        both           experts.base_layer.lora_A = gate_up_proj    experts.lora_A = down_proj
        one of them    experts.lora_A
    """
    ordered = [name for name in _PARAMETERS if name in targeted]
    assert len(ordered) == len(targeted), (experts, targeted)
    found: dict[tuple[str, str], str] = {}
    wrapped = f"{PREFIX}{experts}"
    for name in reversed(ordered):  # from the outermost one in
        for side in "AB":
            found[name, side] = f"{wrapped}.lora_{side}.weight"
        wrapped += ".base_layer"
    return found


def key_of_parameter(name: str, targets: Collection[str]) -> str:
    """The key of a trained base parameter, or of rows of one."""
    owner, _, leaf = name.rpartition(".")
    if leaf == DELTA:
        return f"{PREFIX}{owner}.token_adapter.{leaf}"
    if owner in targets:  # PEFT has wrapped the module that owns it
        return f"{PREFIX}{owner}.base_layer.{leaf}"
    return f"{PREFIX}{name}"


def base_keys(
    targets: Collection[str], plan: ModelPlan, copies: Collection[str] = (), rows: Collection[str] = ()
) -> dict[str, str]:
    """Embedding and head -> the key under which PEFT may also store the base weight, as it does of a resized one.

    rows: modules with rows of their own.
    """
    found = {}
    for name in (plan.embedding, plan.head):
        infix = ""
        if name in rows:
            infix = ".token_adapter.base_layer"
        elif name in targets:
            infix = ".base_layer"
        elif f"{name}.weight" in copies:
            infix = ".original_module"
        if name:  # "": a head that is no linear
            found[name] = f"{PREFIX}{name}{infix}.weight"
    return found


def to_peft(a: Tensor, b: Tensor, *, num_experts: int, is_swapped: bool = False) -> tuple[Tensor, Tensor]:
    """PEFT's A `[r*E, in]` and B `[out, r*E]`; swapped: A `[r*E, out]` and B `[in, r*E]`.

    A shared side is repeated for every expert: PEFT has no shared form.
    """
    r = a.shape[1]
    assert b.shape[2] == r, (a.shape, b.shape)
    assert {len(a), len(b)} <= {1, num_experts}, (a.shape, b.shape, num_experts)
    a, b = a.expand(num_experts, -1, -1), b.expand(num_experts, -1, -1)
    if is_swapped:
        a, b = b.mT, a.mT
    # [E, r, in] -> [E*r, in] and [E, out, r] -> [out, r, E] -> [out, r*E]; clones: safetensors refuses shared memory.
    return a.reshape(num_experts * r, -1).clone(), b.permute(1, 2, 0).reshape(-1, r * num_experts).clone()


def from_peft(a: Tensor, b: Tensor, *, num_experts: int, is_swapped: bool = False) -> ExpertFactors:
    """The inverse of `to_peft`: copies, one adapter per expert."""
    assert a.shape[0] == b.shape[1], (a.shape, b.shape)
    a = a.reshape(num_experts, -1, a.shape[1])  # [E, r, in]
    b = b.reshape(len(b), -1, num_experts).permute(2, 0, 1)  # [E, out, r]
    if is_swapped:
        a, b = b.mT, a.mT
    # Their own memory, in order: they become parameters, and the tensors of the file are dropped.
    return ExpertFactors(a.clone(memory_format=torch.contiguous_format), b.clone(memory_format=torch.contiguous_format))


def to_shared(factors: ExpertFactors, *, where: str) -> ExpertFactors:
    """The shared adapter, E = 1, of experts whose adapters are bitwise equal.

    Raises:
        UserError: they are not; names the first expert that differs. where: begins the message.
    """
    for side, stack in zip("AB", factors, strict=True):
        for expert in range(len(stack)):
            if not torch.equal(stack[expert], stack[0]):
                given = f"{where}: lora_{side} of expert {expert} is not that of expert 0"
                rule = "an adapter that experts share is the same for all of them to the last bit"
                raise UserError(given, rule, "load it as one adapter for each expert")
    return ExpertFactors(factors.a[:1].clone(), factors.b[:1].clone())


def to_blocks(pieces: Mapping[str, ExpertFactors], *, rows: Mapping[str, Tensor], out_features: int) -> ExpertFactors:
    """One adapter of the fused matrix from those of its pieces, in their order.

    Per expert, A is their stack `[sum of r, in]`; B `[out, sum of r]` is zero except each piece's rows in its columns.

    Args:
        rows: piece -> indices of its rows in the fused `out`: `[gate | up]` or interleaved.
    """
    # A side that experts share has one for all: it is repeated beside another side that they do not.
    num_experts = max(max(len(piece.a), len(piece.b)) for piece in pieces.values())
    a, b = [], []
    for name, piece in pieces.items():
        a.append(piece.a.expand(num_experts, -1, -1))
        whole = piece.b.new_zeros(num_experts, out_features, piece.b.shape[2])
        b.append(whole.index_copy(1, rows[name].to(whole.device), piece.b.expand(num_experts, -1, -1)))
    return ExpertFactors(torch.cat(a, 1), torch.cat(b, 2))


def from_blocks(
    factors: ExpertFactors, *, pieces: Sequence[str], rows: Mapping[str, Tensor], where: str
) -> dict[str, ExpertFactors]:
    """The inverse of `to_blocks` for pieces of the same rank.

    Raises:
        UserError: B is not zero outside its blocks. where: begins the message.
    """
    a, b = factors
    assert a.shape[1] % len(pieces) == 0, (a.shape, pieces)
    r = a.shape[1] // len(pieces)
    found = {}
    for index, name in enumerate(pieces):
        columns = slice(index * r, (index + 1) * r)
        found[name] = ExpertFactors(a[:, columns].clone(), b[:, rows[name], columns].clone())
    # Put together again, it must be what was given: that is to say zero outside the blocks.
    if not torch.equal(to_blocks(found, rows=rows, out_features=b.shape[1]).b, b):
        rule = f"it is not zero outside the pieces {list(pieces)}"
        raise UserError(f"{where}: lora_B", rule, "load it as one adapter of the whole matrix")
    return found


def _file_parts(target: Target) -> list[str]:
    return ["A", "B", *target.further]


def _rows_of_pieces(target: Target) -> dict[str, Tensor]:
    assert target.fused is not None, target
    return {piece: target.fused.piece_rows(piece) for piece in target.pieces}


def _as_one(parts: Mapping[str, Tensor], target: Target) -> dict[str, Tensor]:
    """One A and one B of all pieces (`to_blocks`)."""
    pieces = {p: ExpertFactors(_stack(parts[f"A.{p}"]), _stack(parts[f"B.{p}"])) for p in target.pieces}
    whole = to_blocks(pieces, rows=_rows_of_pieces(target), out_features=target.out_features)
    return {"A": _unstacked(whole.a, target), "B": _unstacked(whole.b, target)}


def _in_pieces(parts: Mapping[str, Tensor], target: Target, where: str) -> dict[str, Tensor]:
    """The inverse of `_as_one`; what is further is kept."""
    whole = ExpertFactors(_stack(parts["A"]), _stack(parts["B"]))
    found: dict[str, Tensor] = {}
    for name, piece in from_blocks(whole, pieces=target.pieces, rows=_rows_of_pieces(target), where=where).items():
        found[f"A.{name}"] = _unstacked(piece.a, target)
        found[f"B.{name}"] = _unstacked(piece.b, target)
    for part in target.further:
        found[part] = parts[part]
    return found


def _stack(factor: Tensor) -> Tensor:
    """View a linear as one expert."""
    return factor.reshape(-1, *factor.shape[-2:])


def _unstacked(factor: Tensor, target: Target) -> Tensor:
    """The inverse of `_stack`."""
    if target.num_experts:
        return factor
    return factor[0]
