"""The tensors of a PEFT adapter file: their keys and shapes, and how they are made of factors, both ways.

Owns: the mapping between the factors of targets, whole, and what stands in `adapter_model.safetensors`: adapters on
pieces of a fused matrix in block form, those of experts in PEFT's order (`adapter.formats.expert_format`). Does not
own: the file itself and its checks (`adapter.formats.peft_format`), what is trained (`adapter.targets.resolve`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from meshlora.adapter.formats.expert_format import ExpertFactors, from_blocks, from_peft, peft_keys, to_blocks, to_peft
from meshlora.adapter.targets.resolve import Target

PREFIX = "base_model.model."


def file_tensors(full: Mapping[str, Tensor], targets: Mapping[str, Target]) -> dict[str, Tensor]:
    """Keys and tensors of the file, from the whole factors under their names."""
    tensors: dict[str, Tensor] = {}
    left = dict(full)
    keys = file_keys(targets)
    for target in targets.values():
        parts = {part: left.pop(target.name_of(part)) for part in _parts(target)}
        if target.pieces:
            parts |= _as_one(parts, target)
        if target.num_experts:
            a, b = to_peft(parts["A"], parts["B"], num_experts=target.num_experts, is_swapped=target.is_swapped)
            parts = {"A": a, "B": b}
        tensors |= {keys[target.name, part]: parts[part] for part in _file_parts(target)}
    return tensors | {key_of_parameter(name, targets): tensor for name, tensor in left.items()}


def factors_of_file(
    tensors: Mapping[str, Tensor], targets: Mapping[str, Target], file: Path
) -> dict[str, dict[str, Tensor]]:
    """The inverse of `file_tensors`: target -> part -> whole factor.

    Raises:
        UserError: an adapter on pieces is not zero outside them, or one that experts share differs between them.
    """
    keys = file_keys(targets)
    found: dict[str, dict[str, Tensor]] = {}
    for target in targets.values():
        where = f"{file}: {keys[target.name, 'B']}"
        parts = {part: tensors[keys[target.name, part]] for part in _file_parts(target)}
        if target.num_experts:
            factors = from_peft(
                parts["A"],
                parts["B"],
                num_experts=target.num_experts,
                is_swapped=target.is_swapped,
                is_shared=target.is_shared,
                where=where,
            )
            parts = {"A": factors.a, "B": factors.b}
        found[target.name] = _in_pieces(parts, target, where) if target.pieces else parts
    return found


def file_shapes(targets: Mapping[str, Target]) -> dict[str, tuple[int, ...]]:
    """Key -> shape of every tensor that belongs to a target."""
    keys = file_keys(targets)
    expected: dict[str, tuple[int, ...]] = {}
    for target in targets.values():
        # In the file the pieces are one adapter of all their ranks.
        shapes = replace(target, r=target.r * max(1, len(target.pieces)), pieces=()).shapes
        if number := target.num_experts:
            (*_, r, inside), (*_, out, _) = shapes["A"], shapes["B"]
            inside, out = (out, inside) if target.is_swapped else (inside, out)
            shapes = {"A": (r * number, inside), "B": (out, r * number)}
        expected |= {keys[target.name, part]: shapes[part] for part in _file_parts(target)}
    return expected


def file_keys(targets: Mapping[str, Target]) -> dict[tuple[str, str], str]:
    """(target, part of the file) -> key: `model.layers.0.mlp.up_proj`, "A" ->
    `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`.
    """
    experts: dict[str, list[str]] = {}
    found: dict[tuple[str, str], str] = {}
    for target in targets.values():
        module, _, leaf = target.name.rpartition(".")
        if target.num_experts:
            experts.setdefault(module, []).append(leaf)
            continue
        for part in _file_parts(target):
            is_parameter = target.is_embedding or part == "magnitude"  # PEFT has no linear around these
            found[target.name, part] = f"{PREFIX}{target.name_of(part)}" + ("" if is_parameter else ".weight")
    for module, leaves in experts.items():
        found |= {(f"{module}.{leaf}", side): key for (leaf, side), key in peft_keys(module, leaves).items()}
    return found


def key_of_parameter(name: str, targets: Mapping[str, Target]) -> str:
    """Of a parameter of the base that is trained besides."""
    owner, _, leaf = name.rpartition(".")
    return f"{PREFIX}{owner}.base_layer.{leaf}" if owner in targets else f"{PREFIX}{name}"


def _parts(target: Target) -> list[str]:
    ends = [f".{piece}" for piece in target.pieces] or [""]
    return [f"{side}{end}" for end in ends for side in "AB"] + (["magnitude"] if target.use_dora else [])


def _file_parts(target: Target) -> list[str]:
    return ["A", "B"] + (["magnitude"] if target.use_dora else [])


def _rows_of_pieces(target: Target) -> dict[str, Tensor]:
    assert target.fused is not None, target
    return {piece: target.fused.piece_rows(piece) for piece in target.pieces}


def _as_one(parts: Mapping[str, Tensor], target: Target) -> dict[str, Tensor]:
    """One A and one B of all pieces: A is their stack, B zero outside the rows and columns of each."""
    pieces = {p: ExpertFactors(_stack(parts[f"A.{p}"]), _stack(parts[f"B.{p}"])) for p in target.pieces}
    whole = to_blocks(pieces, rows=_rows_of_pieces(target), out_features=target.out_features)
    return {"A": whole.a, "B": whole.b} if target.num_experts else {"A": whole.a[0], "B": whole.b[0]}


def _in_pieces(parts: Mapping[str, Tensor], target: Target, where: str) -> dict[str, Tensor]:
    """The inverse of `_as_one`; a magnitude stays as it is.

    Raises:
        UserError: B is not zero outside its blocks.
    """
    whole = ExpertFactors(_stack(parts["A"]), _stack(parts["B"]))
    found: dict[str, Tensor] = {}
    for name, piece in from_blocks(whole, pieces=target.pieces, rows=_rows_of_pieces(target), where=where).items():
        a, b = piece if target.num_experts else (piece.a[0], piece.b[0])
        found |= {f"A.{name}": a, f"B.{name}": b}
    return found | {part: value for part, value in parts.items() if part == "magnitude"}


def _stack(factor: Tensor) -> Tensor:
    """A linear is one expert."""
    return factor if factor.ndim == 3 else factor.unsqueeze(0)
