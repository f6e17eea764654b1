"""Triton kernels of the loss of a chunk: what each token needs, and the gradient over the logits.

Owns: the kernels. Does not own: what they compute, and who calls them (`wings.kernels.loss_chunk`). Imported on a GPU
alone, where Triton comes with torch. Sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # logits at once


@triton.jit
def _sums(sums, logits, place, is_here, width, real, stride, least, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program for each token. sums has rows of `stride`."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * width
    highest = tl.full([1], least, dtype=tl.float32)
    z = tl.zeros([1], dtype=tl.float32)
    for start in range(0, real, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row + columns, mask=columns < real, other=float("-inf")).to(tl.float32)
        top = tl.maximum(highest, tl.max(x, 0))
        z = z * tl.exp(highest - top) + tl.sum(tl.exp(x - top), 0)
        highest = top
    label = tl.load(row + tl.load(place + token)).to(tl.float32)
    label = tl.where(tl.load(is_here + token), label, 0.0)
    one = tl.arange(0, 1)
    tl.store(sums + token + one, highest)
    tl.store(sums + stride + token + one, z)
    tl.store(sums + 2 * stride + token, label)


@triton.jit
def _gradient(logits, sums, place, is_here, width, real, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program for some logits of a token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(logits + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    p = tl.exp(x - tl.load(sums + token)) / tl.load(sums + stride + token)
    p = tl.where(columns < real, p, 0.0)
    is_label = (columns == tl.load(place + token)) & tl.load(is_here + token)
    p = tl.where(is_label, p - 1.0, p)
    tl.store(logits + token * width + columns, p.to(logits.dtype.element_ty), mask=inside)


def chunk_sums(sums: Tensor, logits: Tensor, real: int, place: Tensor, is_here: Tensor) -> Tensor:
    """As `wings.kernels.loss_chunk` says."""
    tokens, width = logits.shape
    least = torch.finfo(torch.float32).min
    _sums[(tokens,)](sums, logits, place, is_here, width, real, sums.stride(0), least, BLOCK=_BLOCK, num_warps=8)
    return sums


def chunk_gradient(logits: Tensor, sums: Tensor, real: int, place: Tensor, is_here: Tensor) -> Tensor:
    """As `wings.kernels.loss_chunk` says."""
    tokens, width = logits.shape
    grid = tokens, triton.cdiv(width, _BLOCK)
    _gradient[grid](logits, sums, place, is_here, width, real, sums.stride(0), BLOCK=_BLOCK, num_warps=8)
    return logits
