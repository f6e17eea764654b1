"""Triton kernel of products in float8 by matrices that have a scale for each block.

Owns: the kernel. Does not own: when it runs (`wings.quantized.float8_gpu`), which matrices have blocks that it takes
(`wings.quantized.float8_stored`). Imported on a GPU alone, where Triton comes with torch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Rows that a program multiplies, and how many of its neighbours share codes in the cache: with four warps and three
# stages, what published kernels for blocks of 128 are tuned to on an H200 at 4,096 tokens.
_TILE, _GROUP = tl.constexpr(64), tl.constexpr(16)


@triton.jit
def _product_of_blocks(  # type: ignore[no-untyped-def]
    rows,
    of_rows,
    codes,
    scales,
    bias,
    out,
    num_rows,
    height,
    width,
    down,
    across,
    STEP: tl.constexpr,
    HAS: tl.constexpr,
):
    """A tile of out `[T, N]`: some rows, and the STEP outputs of one block. The sum is over blocks of STEP, too.

    down, across: from the scale of one block to that of the next, along N and along the sum.
    """
    of_row, of_n = tl.swizzle2d(tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), _GROUP)
    row, n, k = of_row * _TILE + tl.arange(0, _TILE), of_n * STEP + tl.arange(0, STEP), tl.arange(0, STEP)
    # Rows and outputs past the end read those before it, and are not written: a mask would cost registers.
    left = rows + (row % num_rows)[:, None].to(tl.int64) * width + k[None, :]
    right = codes + (n % height)[None, :].to(tl.int64) * width + k[:, None]
    total = tl.zeros((_TILE, STEP), tl.float32)
    for start in range(0, width, STEP):
        inside = k < width - start
        x = tl.load(left + start, mask=inside[None, :], other=0.0)
        w = tl.load(right + start, mask=inside[:, None], other=0.0)
        # Not `tl.dot(x, w, total)`: Hopper's tensor cores sum float8 in about 14 bits. Here they sum STEP numbers, and
        # float32 adds the sums; `max_num_imprecise_acc`, which would do so within a product, stays at "never".
        total += tl.dot(x, w) * tl.load(scales + of_n * down + start // STEP * across)
    is_row, is_n = row < num_rows, n < height
    total *= tl.load(of_rows + row, mask=is_row, other=0.0)[:, None]
    if HAS:
        total += tl.load(bias + n, mask=is_n, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None].to(tl.int64) * height + n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_n[None, :])


def write_blocks(
    out: Tensor, rows: Tensor, of_rows: Tensor, codes: Tensor, scales: Tensor, step: int, bias: Tensor | None
) -> None:
    """out `[T, N]` = of_rows (rows W^T) + bias, where W[n,k] = scales[n // step, k // step] codes[n,k].

    rows `[T, K]`, codes `[N, K]`: e4m3, contiguous, as `out` is. of_rows `[T, 1]`, scales: float32, these in any order.
    """
    (height, width), num_rows = codes.shape, len(rows)
    assert out.is_contiguous(), out.stride()
    grid = triton.cdiv(height, step), triton.cdiv(num_rows, _TILE.value)
    given = rows, of_rows, codes, scales, out if bias is None else bias, out, num_rows, height, width, *scales.stride()
    _product_of_blocks[grid](*given, STEP=step, HAS=bias is not None, num_warps=4, num_stages=3)
