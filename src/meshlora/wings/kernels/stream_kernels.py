"""Triton kernels of sums of the residual stream with the norm after them: one forward, one backward.

Owns: the kernels. Does not own: what they compute, and who calls them (`wings.kernels.stream_sums`). Imported on a GPU
alone, where Triton comes with torch. Products are of rounded numbers, summed in float32.

A program has some tokens, and goes over their features twice: a norm needs the sum of all before it gives out one. What
the second pass reads is what the first has read or written, in the cache.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from meshlora.wings.kernels.tail_kernels import LEAST_RANK, _columns_of, _dot, _rows_of

_ROWS = 16  # the least of a product of Triton


@triton.jit
def _stream_sum(  # type: ignore[no-untyped-def]
    y, z, b, residual, weight, h, n, inverse,
    tokens, width, eps, stride_z, down, across, rank,
    R: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    low = _rows_of(z, rows, stride_z, tokens, rank, R)
    squares = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, width, WIDE):
        columns = start + tl.arange(0, WIDE)
        inside = (rows < tokens)[:, None] & (columns < width)[None, :]
        place = rows[:, None].to(tl.int64) * width + columns[None, :]
        term = _dot(low, _columns_of(b, columns, down, across, width, rank, R))
        total = tl.load(y + place, mask=inside, other=0.0).to(tl.float32) + term
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        found = total.to(h.dtype.element_ty)
        tl.store(h + place, found, mask=inside)
        wide = found.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    r = 1.0 / tl.sqrt(squares / width + eps)
    tl.store(inverse + rows, r, mask=rows < tokens)
    tl.debug_barrier()  # what other threads of the program have written is read below
    for start in range(0, width, WIDE):
        columns = start + tl.arange(0, WIDE)
        inside = (rows < tokens)[:, None] & (columns < width)[None, :]
        place = rows[:, None].to(tl.int64) * width + columns[None, :]
        x = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
        normed = (x * r[:, None]).to(n.dtype.element_ty).to(tl.float32)
        tl.store(n + place, (normed * w[None, :]).to(n.dtype.element_ty), mask=inside)


@triton.jit
def _stream_back(  # type: ignore[no-untyped-def]
    grad, passed, h, weight, inverse, b, dh, dz,
    tokens, width, scale, down, across, rank,
    HAS_PASSED: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = tl.load(inverse + rows, mask=rows < tokens, other=0.0)
    along = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, width, WIDE):
        columns = start + tl.arange(0, WIDE)
        inside = (rows < tokens)[:, None] & (columns < width)[None, :]
        place = rows[:, None].to(tl.int64) * width + columns[None, :]
        w = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
        of_n = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) * w[None, :]
        along += tl.sum(of_n * tl.load(h + place, mask=inside, other=0.0).to(tl.float32), 1)
    along = r * r * r * (along / width)
    total = tl.zeros([ROWS, R], dtype=tl.float32)
    for start in range(0, width, WIDE):
        columns = start + tl.arange(0, WIDE)
        inside = (rows < tokens)[:, None] & (columns < width)[None, :]
        place = rows[:, None].to(tl.int64) * width + columns[None, :]
        w = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
        of_n = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) * w[None, :]
        x = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
        wide = r[:, None] * of_n - x * along[:, None]
        if HAS_PASSED:
            wide += tl.load(passed + place, mask=inside, other=0.0).to(tl.float32)
        found = wide.to(dh.dtype.element_ty)
        tl.store(dh + place, found, mask=inside)
        total += _dot(found, tl.trans(_columns_of(b, columns, down, across, width, rank, R)))
    low = tl.arange(0, R)
    there = rows[:, None].to(tl.int64) * rank + low[None, :]
    inside = (rows < tokens)[:, None] & (low < rank)[None, :]
    tl.store(dz + there, (total * scale).to(dz.dtype.element_ty), mask=inside)


def stream_sum(y: Tensor, z: Tensor, b: Tensor, residual: Tensor, weight: Tensor, eps: float, *found: Tensor) -> None:
    """As `wings.kernels.stream_sums` says. found: where h, n and r go."""
    assert z.stride(1) == 1, z.stride()
    tensors = y.contiguous(), z, b, residual.contiguous(), weight, *found
    sizes = *y.shape, eps, z.stride(0), *b.mT.stride(), b.shape[1]
    _stream_sum[_grid(y)](*tensors, *sizes, **_how(y, b))


def stream_back(
    grad: Tensor, passed: Tensor | None, h: Tensor, weight: Tensor, r: Tensor, b: Tensor, *rest: Any
) -> None:
    """As `wings.kernels.stream_sums` says. rest: the scale, and where the results go."""
    scale, dh, dz = rest
    given = grad if passed is None else passed  # which is read if it is there
    sizes = *h.shape, scale, *b.mT.stride(), b.shape[1]
    how = _how(h, b) | {"HAS_PASSED": passed is not None}
    _stream_back[_grid(h)](grad, given, h.contiguous(), weight, r, b, dh, dz, *sizes, **how)


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(len(x), _ROWS),)


def _how(x: Tensor, b: Tensor) -> dict[str, Any]:
    """Tiles, which are in registers: of half as many features where numbers are twice as wide."""
    rank = triton.next_power_of_2(max(LEAST_RANK, b.shape[1]))
    return {"R": rank, "ROWS": _ROWS, "WIDE": 512 // x.element_size(), "num_warps": 8}
