"""Private names of torch: fused kernels of attention and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, dropout: float, is_causal: bool, mask: Tensor | None, scale: Any
) -> Tensor:
    """Fused attention `[B, h, S, d]`, also on the meta device, where the public function picks another kernel."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = fused(query, key, value, dropout, is_causal, attn_mask=mask, scale=scale)[0]
    return out


def fused_norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x r`, in the dtype of x, and `r = (mean(x^2) + eps)^-1/2` over the last dim, `[..., 1]`: one kernel on a GPU.

    The public function keeps r to itself. On the meta device, where torch has no kernel for it, another norm stands for
    it.
    """
    shape = [x.shape[-1]]
    if x.is_meta:
        n, _, r = torch.native_layer_norm(x, shape, None, None, eps)
        return n, r
    n, r = torch.ops.aten._fused_rms_norm(x, shape, None, eps)
    return n, r


def fused_norm_back(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> Tensor:
    """The gradient of x, where `grad` is that of `x r weight`; r of `fused_norm`."""
    shape, aten = [x.shape[-1]], torch.ops.aten
    dx: Tensor
    if x.is_meta:
        dx, *_ = aten.native_layer_norm_backward(grad, x, shape, r, r, weight, None, [True, False, False])
    else:
        dx, _ = aten._fused_rms_norm_backward(grad.contiguous(), x, shape, r, weight, [True, False])
    return dx


def attention_with_sums(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Fused attention, `[B, h, n, d]`, and the log of each query's sum of exponentials, `[B, h, n]`, which the public
    function keeps to itself. Causal: query i sees the keys up to the i-th. h is a multiple of the heads of keys.
    """
    aten = torch.ops.aten
    if query.is_cpu:
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
        return out, sums
    given = query, key.contiguous(), value.contiguous()
    out, sums, *_ = aten._scaled_dot_product_flash_attention(*given, 0.0, is_causal, scale=scale)
    return out, sums


def attention_back(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key, value of `attention_with_sums`; with `out`, `sums` of more keys, the terms of these."""
    aten = torch.ops.aten
    if query.is_cpu:
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward
        options: tuple[Any, ...] = (0.0, is_causal)
    else:
        # The kernel reads the sums without strides, and keys as torch's own context parallelism gives them. Its last
        # two are a random state, read for dropout alone.
        key, value, sums = key.contiguous(), value.contiguous(), sums.contiguous()
        back, state = aten._scaled_dot_product_flash_attention_backward, sums.new_zeros(2, dtype=torch.int64)
        options = None, None, query.shape[-2], key.shape[-2], 0.0, is_causal, state, state[:0]
    of_query, of_key, of_value = back(grad, query, key, value, out, sums, *options, scale=scale)
    return of_query, of_key, of_value


def scaled_product(
    left: Tensor, right: Tensor, of_rows: Tensor, of_columns: Tensor, *, bias: Tensor | None, out: Tensor
) -> None:
    """out `[T, N]` = (left right) of_rows of_columns + bias: e4m3 left `[T, K]` and right `[K, N]`, whose columns lie
    in memory one after the other; scales `[T, 1]`, `[1, N]` in float32. Sums are not those of fast accumulation.

    torch's public `F.scaled_mm` takes no `out`.
    """
    product: Any = torch._scaled_mm
    options = {"scale_a": of_rows, "scale_b": of_columns, "bias": bias, "out_dtype": out.dtype, "use_fast_accum": False}
    if not out.is_meta:  # of which torch has no variant with `out`
        options["out"] = out
    product(left, right, **options)
