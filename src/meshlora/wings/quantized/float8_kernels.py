"""Triton kernels of products in float8: rows to codes, and codes that lie the other way.

Owns: the kernels. Does not own: when they run (`wings.quantized.float8_gpu`). Imported on a GPU alone, where Triton
comes with torch. The numbers are those of `wings.quantized.float8`, with one exponent a row.

Arguments of a kernel have no annotations but `tl.constexpr`: Triton looks up the names in them, and takes no other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64  # of a matrix, either way


@triton.jit
def _exponent(largest):  # type: ignore[no-untyped-def]
    """ceil(log2(largest / 448)), at least -126, and 0 of zero: 448 = 1.75 * 2^8."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(largest == 0.0, 0, tl.maximum(exponent, -126))


@triton.jit
def _power(exponent):  # type: ignore[no-untyped-def]
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _round_rows(x, codes, scales, factor, width, BLOCK: tl.constexpr, HAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program for each row, which is in registers as a whole."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    exponent = _exponent(tl.max(tl.abs(values), 0))
    small = values * _power(-exponent)
    # A GPU's cast saturates: of infinity it would make 448.
    small = tl.where(tl.abs(small) <= 448.0, small, float("nan"))
    tl.store(codes + row * width + columns, small.to(codes.dtype.element_ty), mask=inside)
    scale = _power(exponent)
    if HAS:
        scale = scale * tl.load(factor)
    tl.store(scales + row, scale)


@triton.jit
def _across(codes, scale, out, height, width, TILE: tl.constexpr, PLAIN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of `[height, width]` to `[width, height]`; PLAIN: of numbers, which are rounded."""
    down = tl.program_id(0) * TILE + tl.arange(0, TILE)
    right = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (down[:, None] < height) & (right[None, :] < width)
    tile = tl.load(codes + down[:, None].to(tl.int64) * width + right[None, :], mask=inside, other=0)
    if PLAIN:
        # Times the reciprocal, which is exact: a GPU's fast division is not.
        exponent = (tl.load(scale).to(tl.int32, bitcast=True) >> 23) - 127
        tile = (tile.to(tl.float32) * _power(-exponent)).to(out.dtype.element_ty)
    there = out + right[:, None].to(tl.int64) * height + down[None, :]
    tl.store(there, tl.trans(tile), mask=(right[:, None] < width) & (down[None, :] < height))


def round_rows(x: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """x `[T, K]`, contiguous -> codes `[T, K]`, e4m3, and scales `[T, 1]` in float32, times factor[0]."""
    height, width = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(height, 1, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    given = scales if factor is None else factor
    _round_rows[(height,)](x, codes, scales, given, width, BLOCK=block, HAS=factor is not None, num_warps=8)
    return codes, scales


def codes_across(codes: Tensor, scale: Tensor) -> Tensor:
    """`[N, K]`, codes as bytes or plain numbers -> e4m3 `[K, N]`, contiguous."""
    height, width = codes.shape
    is_plain = codes.dtype != torch.uint8
    out = codes.new_empty(width, height, dtype=torch.float8_e4m3fn if is_plain else torch.uint8)
    grid = triton.cdiv(height, _TILE), triton.cdiv(width, _TILE)
    _across[grid](codes, scale, out, height, width, TILE=_TILE, PLAIN=is_plain)
    return out.view(torch.float8_e4m3fn)
