"""Triton kernels of low-rank terms in a gated MLP: one forward, one backward.

Owns: the kernels. Does not own: what they compute, and who calls them (`wings.kernels.tails`). Imported on a GPU alone,
where Triton comes with torch. Products are of rounded numbers, summed in float32.

Arguments of a kernel have no annotations but `tl.constexpr`: Triton looks up the names in them, and takes no other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_RANK = 16  # of a product of Triton


@triton.jit
def _rows_of(z, rows, stride, number, rank, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """`[rows, R]` of z `[number, rank]`, zeros beyond."""
    r = tl.arange(0, R)
    inside = (rows < number)[:, None] & (r < rank)[None, :]
    return tl.load(z + rows[:, None].to(tl.int64) * stride + r[None, :], mask=inside, other=0.0)


@triton.jit
def _columns_of(factor, columns, down, across, width, rank, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """`[R, columns]` of a factor `[rank, width]`, which has these strides; zeros beyond."""
    r = tl.arange(0, R)
    inside = (r < rank)[:, None] & (columns < width)[None, :]
    place = r[:, None].to(tl.int64) * down + columns[None, :].to(tl.int64) * across
    return tl.load(factor + place, mask=inside, other=0.0)


@triton.jit
def _dot(left, right):  # type: ignore[no-untyped-def]
    """In float32, of float32 too: never as TF32."""
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _gate_tail(  # type: ignore[no-untyped-def]
    gate, up, z_gate, z_up, b_gate, b_up, a, product, z,
    tokens, width, scale, stride_gate, stride_up, gate_down, gate_across, up_down, up_across, r_gate, r_up, r_down,
    R: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program for some tokens, over all features: z is a sum over these."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    zg = _rows_of(z_gate, rows, stride_gate, tokens, r_gate, R)
    zu = _rows_of(z_up, rows, stride_up, tokens, r_up, R)
    total = tl.zeros([ROWS, R], dtype=tl.float32)
    for start in range(0, width, WIDE):
        columns = start + tl.arange(0, WIDE)
        inside = (rows < tokens)[:, None] & (columns < width)[None, :]
        place = rows[:, None].to(tl.int64) * width + columns[None, :]
        bg = _columns_of(b_gate, columns, gate_down, gate_across, width, r_gate, R)
        bu = _columns_of(b_up, columns, up_down, up_across, width, r_up, R)
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32) + _dot(zg, bg)
        u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32) + _dot(zu, bu)
        p = (g * tl.sigmoid(g) * u).to(product.dtype.element_ty)
        tl.store(product + place, p, mask=inside)
        total += _dot(p, tl.trans(_columns_of(a, columns, width, 1, width, r_down, R)))
    r = tl.arange(0, R)
    there = rows[:, None].to(tl.int64) * r_down + r[None, :]
    tl.store(z + there, (total * scale).to(z.dtype.element_ty), mask=(rows < tokens)[:, None] & (r < r_down)[None, :])


@triton.jit
def _gate_tail_back(  # type: ignore[no-untyped-def]
    grad, gate, up, z_gate, z_up, b_gate, b_up, a, dz, of_z, of_factors,
    tokens, width, scale, stride_gate, stride_up, gate_down, gate_across, up_down, up_across, r_gate, r_up, r_down, own,
    R: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program for some features of a part of the tokens, `own` of them: gradients of factors are sums over these."""
    columns = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    first = tl.program_id(1) * own
    stop = tl.minimum(first + own, tokens)
    r, ranks = tl.arange(0, R), r_gate + r_up
    bg = _columns_of(b_gate, columns, gate_down, gate_across, width, r_gate, R)
    bu = _columns_of(b_up, columns, up_down, up_across, width, r_up, R)
    down = _columns_of(a, columns, width, 1, width, r_down, R)
    of_gate = tl.zeros([R, WIDE], dtype=tl.float32)
    of_up = tl.zeros([R, WIDE], dtype=tl.float32)
    of_a = tl.zeros([R, WIDE], dtype=tl.float32)
    for start in range(first, stop, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < stop)[:, None] & (columns < width)[None, :]
        place = rows[:, None].to(tl.int64) * width + columns[None, :]
        zg = _rows_of(z_gate, rows, stride_gate, stop, r_gate, R)
        zu = _rows_of(z_up, rows, stride_up, stop, r_up, R)
        dzs = _rows_of(dz, rows, r_down, stop, r_down, R)
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32) + _dot(zg, bg)
        u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32) + _dot(zu, bu)
        dp = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) + scale * _dot(dzs, down)
        sigmoid = tl.sigmoid(g)
        silu = g * sigmoid
        p = (silu * u).to(gate.dtype.element_ty)
        dg = (dp * u * (sigmoid + silu * (1.0 - sigmoid))).to(gate.dtype.element_ty)
        du = (dp * silu).to(gate.dtype.element_ty)
        tl.store(gate + place, dg, mask=inside)
        tl.store(up + place, du, mask=inside)
        there = of_z + (tl.program_id(0).to(tl.int64) * tokens + rows[:, None]) * ranks + r[None, :]
        in_rows = (rows < stop)[:, None]
        tl.store(there, _dot(dg, tl.trans(bg)), mask=in_rows & (r < r_gate)[None, :])
        tl.store(there + r_gate, _dot(du, tl.trans(bu)), mask=in_rows & (r < r_up)[None, :])
        of_gate += _dot(tl.trans(zg), dg)
        of_up += _dot(tl.trans(zu), du)
        of_a += _dot(tl.trans(dzs), p)
    there = of_factors + (tl.program_id(1).to(tl.int64) * (ranks + r_down) + r[:, None]) * width + columns[None, :]
    in_columns = (columns < width)[None, :]
    tl.store(there, of_gate, mask=in_columns & (r < r_gate)[:, None])
    tl.store(there + tl.cast(r_gate, tl.int64) * width, of_up, mask=in_columns & (r < r_up)[:, None])
    tl.store(there + tl.cast(ranks, tl.int64) * width, of_a * scale, mask=in_columns & (r < r_down)[:, None])


def gate_tail(gate: Tensor, up: Tensor, *given: Any, columns: int) -> tuple[Tensor, Tensor]:
    """As `wings.kernels.tails` says. given: both z, both B, A and its scale."""
    *factors, a, scale = given
    product, z = torch.empty_like(gate), gate.new_empty(len(gate), len(a))
    how = _how(gate, columns, *factors, a)
    grid = (triton.cdiv(len(gate), how["ROWS"]),)
    _gate_tail[grid](gate, up, *factors, a.contiguous(), product, z, *_sizes(gate, scale, *factors, a), **how)
    return product, z


def gate_tail_back(grad: Tensor, gate: Tensor, up: Tensor, *given: Any, columns: int) -> None:
    """As `wings.kernels.tails` says. given: both z, both B, A, dz, the scale of A, and where the terms go."""
    *factors, a, dz, scale, of_z, of_factors = given
    own = triton.cdiv(len(gate), len(of_factors))
    tensors = grad, gate, up, *factors, a.contiguous(), dz, of_z, of_factors
    sizes, how = _sizes(gate, scale, *factors, a), _how(gate, columns, *factors, a)
    _gate_tail_back[(len(of_z), len(of_factors))](*tensors, *sizes, own, **how)


def _sizes(gate: Tensor, scale: float, *factors: Tensor) -> tuple[Any, ...]:
    """Sizes, strides and ranks of both kernels."""
    z_gate, z_up, b_gate, b_up, a = factors
    assert z_gate.stride(1) == z_up.stride(1) == 1, (z_gate.stride(), z_up.stride())
    strides = z_gate.stride(0), z_up.stride(0), *b_gate.mT.stride(), *b_up.mT.stride()
    return *gate.shape, scale, *strides, z_gate.shape[1], z_up.shape[1], len(a)


def _how(gate: Tensor, columns: int, *factors: Tensor) -> dict[str, int]:
    """Tiles, which are in registers: of half as many tokens where numbers are twice as wide."""
    z_gate, z_up, _, _, a = factors
    rank = triton.next_power_of_2(max(LEAST_RANK, z_gate.shape[1], z_up.shape[1], len(a)))
    return {"R": rank, "ROWS": 64 // gate.element_size(), "WIDE": columns, "num_warps": 8}
