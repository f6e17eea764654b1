"""The reference's quantised base: every linear but head and routers, and all experts, each matrix rounded as a whole.

The published formulas of fp8, mxfp4 and nvfp4 are written a second time; the rounding to nf4 and int8 is bitsandbytes'.
Nothing here knows that a matrix can be split.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshlora_judge.experts import expert_modules, matrices

_BLOCK = 64
_ROUTER = re.compile(r"(gate|router)(\.|$)")
# The numbers of 1 sign, 2 exponent and 1 mantissa bit, in the order of their codes.
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@torch.no_grad()
def quantize_base(model: Any, kind: str | None) -> None:
    """Round the weights of every linear of `model` but its head and routers, and of all experts, to `kind`.

    kind: nf4, int8, mxfp4, nvfp4, fp8; None and "keep", a base that is stored in few bits, change nothing. The rounding
    is in float32 for every dtype of the model, and its result is cast to that dtype.
    """
    if kind in (None, "keep"):
        return
    rounded = _ROUNDED[str(kind)]
    for module in plain_linears(model):
        matrix = module.weight.T if isinstance(module, Conv1D) else module.weight  # [out, in]
        kept = rounded(matrix.float().contiguous())
        module.weight.copy_(kept.T if isinstance(module, Conv1D) else kept)
    for stack in matrices(model).values():
        for matrix in stack:
            matrix.copy_(rounded(matrix.float().contiguous()))


def rounded_matrix(matrix: Tensor, kind: str) -> Tensor:
    """Float32 `[out, in]`: `matrix` rounded to `kind`, as `quantize_base` rounds it."""
    return _ROUNDED[kind](matrix.float().contiguous())


def plain_linears(model: Any) -> list[nn.Linear | Conv1D]:
    """The linears of `model` but its head, routers, and block-diagonal ones (deepseek_v4), which stay plain."""
    left = {module for module in model.modules() if isinstance(module, nn.Linear) and hasattr(module, "n_groups")}
    for head in (model.get_output_embeddings(), getattr(model, "score", None), getattr(model, "classifier", None)):
        if head is not None:
            left |= {*head.modules()}
    for name in expert_modules(model):  # the block of the experts has its router beside them
        block = model.get_submodule(name.rpartition(".")[0])
        left |= {module for inside, module in block.named_modules() if _ROUTER.match(inside)}
    return [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m not in left]


def _nf4(matrix: Tensor) -> Tensor:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(matrix, blocksize=_BLOCK, quant_type="nf4", compress_statistics=False)
    normal: Tensor = functional.dequantize_4bit(codes, state)
    return normal


def _int8(matrix: Tensor) -> Tensor:
    from bitsandbytes import functional

    levels = functional.create_linear_map(signed=True, total_bits=8).to(matrix.device)
    codes, state = functional.quantize_blockwise(matrix, code=levels, blocksize=_BLOCK)
    rounded: Tensor = functional.dequantize_blockwise(codes, state)
    return rounded


def _fp8(matrix: Tensor) -> Tensor:
    """Blocks of 128 x 128, the last ones smaller, whose largest number becomes 448."""
    rounded = torch.empty_like(matrix)
    for top in range(0, matrix.shape[0], 128):
        for left in range(0, matrix.shape[1], 128):
            block = matrix[top : top + 128, left : left + 128]
            scale = block.abs().max() / 448
            scale = scale if scale > 0 else torch.ones_like(scale)
            rounded[top : top + 128, left : left + 128] = (block / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded


def _mxfp4(matrix: Tensor) -> Tensor:
    """Groups of 32 input features, by OCP Microscaling Formats 1.0, section 6.3: 2^(floor(log2(largest)) - 2) times the
    nearest number, of two the one with an even code."""
    groups = matrix.reshape(-1, 32)
    largest = groups.abs().amax(1, keepdim=True)
    power = torch.floor(torch.log2(largest.double()))
    scale = torch.where(largest > 0, torch.exp2((power - 2).clamp(min=-127)), 1.0)
    nearest = _nearest_e2m1(groups.double() / scale) * scale
    return nearest.float().view_as(matrix)


def _nvfp4(matrix: Tensor) -> Tensor:
    """Groups of 16 input features, by modelopt's rule: the largest number of the matrix becomes 6 * 448, that of a
    group 6, its scale is rounded to e4m3; each number is the nearest e2m1 times the product of the two scales."""
    groups = matrix.reshape(-1, 16)
    of_matrix = matrix.abs().max() / 2688
    of_matrix = of_matrix if of_matrix > 0 else torch.ones_like(of_matrix)
    scales = (groups.abs().amax(1, keepdim=True) / 6 / of_matrix).to(torch.float8_e4m3fn).float()
    scales = torch.where(scales == 0, 1.0, scales) * of_matrix
    nearest = _nearest_e2m1(groups.double() / scales.double())
    return (nearest.float() * scales).view_as(matrix)


def _nearest_e2m1(quotients: Tensor) -> Tensor:
    """The nearest number of e2m1 to each, of two equally near ones that with the even code. float64."""
    numbers = torch.tensor(_E2M1, dtype=torch.float64)
    distances = quotients.abs().unsqueeze(-1) - numbers
    # Of two equally near ones the odd code loses.
    order = distances.abs() + 1e-12 * (torch.arange(8) % 2)
    return numbers[order.argmin(-1)] * quotients.sign()


_ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "nf4": _nf4,
    "int8": _int8,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}
