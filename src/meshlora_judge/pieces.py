"""Adapters on pieces of fused matrices, in PEFT's form: one adapter of their total rank, with a block-wise B.

The rows of q, k, v, gate and up in each family's fused matrices are derived a second time from the model's code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshlora_ground.errors import UnsupportedError
from meshlora_judge.experts import Stack, stack_of

# How a model splits the output of its fused linear: into blocks, or into heads first and each head into q, k, v.
_BLOCKS = ("gpt2", "openai-gpt", "mpt", "phi3")
_PER_HEAD = ("gpt_neox", "bloom", "persimmon", "gpt_neox_japanese")
_GATE_UP = ("gate_up_proj", "input_linear", "mlp.Wi", "mlp.fc1")
# Rows of gate and up alternate in their experts.
_INTERLEAVED_EXPERTS = ("gpt_oss", "openai_privacy_filter")


def rows_of(config: Any, module: str, piece: str, out_features: int) -> Tensor:
    """The rows of `piece` in the fused matrix `module`, int64. Raises: UnsupportedError: the judge knows none of it."""
    rows = torch.arange(out_features)
    heads = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    family = config.model_type
    found: dict[str, Tensor] = {}
    if family in _INTERLEAVED_EXPERTS and stack_of(module).endswith("experts.gate_up_proj"):
        found = {"gate": rows[::2], "up": rows[1::2]}
    elif module.endswith(_GATE_UP):
        found = dict(zip(("gate", "up"), rows.view(2, -1), strict=True))
    elif family == "codegen":  # four groups of heads, each with its q, v and k
        found = {name: rows.view(4, 3, -1)[:, place].flatten() for place, name in enumerate("qvk")}
    elif family == "falcon" and config.new_decoder_architecture:
        groups = rows.view(config.num_kv_heads, heads // config.num_kv_heads + 2, -1)
        parts = groups.split([heads // config.num_kv_heads, 1, 1], dim=1)
        found = {name: part.flatten() for name, part in zip("qkv", parts, strict=True)}
    elif family in _PER_HEAD or (family in ("falcon", "gpt_bigcode") and not config.multi_query):
        found = {name: rows.view(heads, 3, -1)[:, place].flatten() for place, name in enumerate("qkv")}
    elif family in (*_BLOCKS, "falcon", "gpt_bigcode"):
        if family in ("falcon", "gpt_bigcode"):  # multi-query
            kv = 1
        width = out_features // (heads + 2 * kv)
        found = dict(zip("qkv", rows.split([heads * width, kv * width, kv * width]), strict=True))
    if piece not in found:
        rule = f"the proof does not know it in {family}"
        raise UnsupportedError(f"pieces: {piece!r} of {module}", rule, "train the whole matrix")
    return found[piece]


def pieces_of(module: str, pieces: Mapping[str, Iterable[str]]) -> list[str]:
    """The pieces of `module`, which may be one expert's, that have an adapter; [] if the adapter is on all of it."""
    for name in {module, stack_of(module)}:
        for key, found in pieces.items():
            if name == key or name.endswith(f".{key}"):
                return list(found)
    return []


def mask_of(config: Any, module: str, names: list[str], shape: tuple[int, ...], stack: Stack | None = None) -> Tensor:
    """1 where PEFT's output-side factor of `shape` may be non-zero: B of a linear or of all experts, or their A."""
    num_experts, is_swapped, (out_features, ranks) = 1, False, shape
    if stack is not None and not stack.is_shared:
        num_experts = stack.num_experts
    if stack is not None and stack.is_swapped:
        is_swapped, (ranks, out_features) = True, shape
    mask = torch.zeros(out_features, ranks // num_experts)
    rank = mask.shape[1] // len(names)
    for number, piece in enumerate(names):
        mask[rows_of(config, module, piece, out_features), number * rank : (number + 1) * rank] = 1
    if is_swapped:
        return mask.T.repeat(num_experts, 1)  # [r E, out]
    return mask.repeat_interleave(num_experts, dim=1)  # [out, r E]


def in_pieces(config: Any, tensors: Mapping[str, Tensor], pieces: Mapping[str, Iterable[str]]) -> dict[str, Tensor]:
    """Factors by name, with those on pieces separated into `module.lora_A.q`, `module.lora_B.q`."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, side = name.rpartition(".lora_")
        names = pieces_of(module, pieces) if side in ("A", "B") else []
        if not names:
            found[name] = tensor
            continue
        if side == "A":
            for piece, part in zip(names, tensor.chunk(len(names)), strict=True):
                found[f"{name}.{piece}"] = part
            continue
        rank = tensor.shape[1] // len(names)
        outside = tensor * (1 - mask_of(config, module, names, tensor.shape)).to(tensor)
        if bool(outside.any()):
            found[f"{name} outside its pieces"] = outside
        for number, piece in enumerate(names):
            rows = rows_of(config, module, piece, len(tensor))
            found[f"{name}.{piece}"] = tensor[rows, number * rank : (number + 1) * rank]
    return found
