"""Adapters on pieces of fused matrices, in PEFT's words: one adapter of all their ranks, with a B of blocks.

Owns: where the rows of q, k, v, gate and up lie in the fused matrices of each family, written a second time from what
the model's code does with its output; and the split of PEFT's A and B into those of the pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# How a model cuts the output of its fused linear: into blocks, or into heads first and each head into three.
_BLOCKS = {"gpt2": "q k v", "openai-gpt": "q k v", "mpt": "q k v", "phi3": "q k v", "gpt_bigcode": "q k v"}
_PER_HEAD = {"gpt_neox": "q k v", "bloom": "q k v", "persimmon": "q k v", "gpt_neox_japanese": "q k v"}


def rows_of(config: Any, module: str, piece: str, out_features: int) -> Tensor:
    """The rows of `piece` in the fused matrix `module`, int64."""
    rows = torch.arange(out_features)
    if "gate_up" in module:
        return rows.view(2, -1)[["gate", "up"].index(piece)]
    heads = config.num_attention_heads
    if config.model_type in _PER_HEAD:
        return rows.view(heads, 3, -1)[:, _PER_HEAD[config.model_type].split().index(piece)].flatten()
    assert config.model_type in _BLOCKS, f"pieces of {config.model_type} are not known to the judge"
    kv = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False):
        kv = 1
    width = out_features // (heads + 2 * kv)
    return rows.split([heads * width, kv * width, kv * width])["qkv".index(piece)]


def pieces_of(module: str, pieces: Mapping[str, Iterable[str]]) -> list[str]:
    """The pieces that an adapter on `module` is on; none where it is on all of it."""
    return next((list(p) for key, p in pieces.items() if module == key or module.endswith(f".{key}")), [])


def mask_of(config: Any, module: str, names: list[str], shape: tuple[int, int]) -> Tensor:
    """1 where B `[out, ranks of all pieces]` may differ from zero."""
    mask = torch.zeros(shape)
    rank = shape[1] // len(names)
    for number, piece in enumerate(names):
        mask[rows_of(config, module, piece, shape[0]), number * rank : (number + 1) * rank] = 1
    return mask


def in_pieces(config: Any, tensors: Mapping[str, Tensor], pieces: Mapping[str, Iterable[str]]) -> dict[str, Tensor]:
    """Factors by name, those on pieces as `module.lora_A.q`, `module.lora_B.q`."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, side = name.rpartition(".lora_")
        names = pieces_of(module, pieces) if side in ("A", "B") else []
        if not names:
            found[name] = tensor
            continue
        if side == "A":
            found |= {f"{name}.{piece}": part for piece, part in zip(names, tensor.chunk(len(names)), strict=True)}
            continue
        rank = tensor.shape[1] // len(names)
        outside = tensor * (1 - mask_of(config, module, names, (tensor.shape[0], tensor.shape[1]))).to(tensor)
        if bool(outside.any()):
            found[f"{name} outside its pieces"] = outside
        for number, piece in enumerate(names):
            rows = rows_of(config, module, piece, len(tensor))
            found[f"{name}.{piece}"] = tensor[rows, number * rank : (number + 1) * rank]
    return found
