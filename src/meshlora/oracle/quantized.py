"""The reference's quantised base: every linear but the output head, rounded as a whole by bitsandbytes.

Owns: which matrices are rounded, and storing the rounded values as plain numbers. Does not own: the rounding, which is
the library's. Nothing here knows that a matrix can be split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_BLOCK = 64


@torch.no_grad()
def quantize_base(model: Any, kind: str | None) -> None:
    """Round the weights of every linear of `model` but its head to `kind` (nf4, int8).

    64 weights of one output feature share a scale. The rounding is in float32 for every dtype of the model, and its
    result is cast to that dtype.
    """
    if kind is None:
        return
    head = model.get_output_embeddings()
    for module in model.modules():
        if not isinstance(module, nn.Linear | Conv1D) or module is head:
            continue
        matrix = module.weight.T if isinstance(module, Conv1D) else module.weight  # [out, in]
        kept = _rounded(matrix.float().contiguous(), kind)
        module.weight.copy_(kept.T if isinstance(module, Conv1D) else kept)


def _rounded(matrix: Tensor, kind: str) -> Tensor:
    from bitsandbytes import functional

    if kind == "nf4":
        codes, state = functional.quantize_4bit(matrix, blocksize=_BLOCK, quant_type="nf4", compress_statistics=False)
        normal: Tensor = functional.dequantize_4bit(codes, state)
        return normal
    assert kind == "int8", kind
    levels = functional.create_linear_map(signed=True, total_bits=8).to(matrix.device)
    codes, state = functional.quantize_blockwise(matrix, code=levels, blocksize=_BLOCK)
    rounded: Tensor = functional.dequantize_blockwise(codes, state)
    return rounded
