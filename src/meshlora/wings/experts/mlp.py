"""The MLPs of all experts of a layer as one autograd function, over rows sorted by expert.

Owns: what is saved between forward and backward, and what is recomputed. Does not own: the grouped products
(`wings.experts.products`), the gate, which is the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from meshlora.layers.rounded import rounded
from meshlora.wings.experts import products
from meshlora.wings.experts.row_counts import RowCounts
from meshlora_ground.float64 import is_lifted, lift


class GroupedMlpFunction(Function):
    """out[m] = sum_j w[m,j] f_e(x[m]), f_e(x) = fc2_e(gate(fc1_e(x))), e the expert of place j of m.

    Shapes: x `[M, H]`; index int64 `[N]`, the row of x behind the n-th sorted row; places int64 `[M, k]`, the sorted
    rows of row m, in the order in which they are summed; N = M k; weights `[M, k]` or None for ones; out `[M, H]`.
    For a rank's own tokens, places are those of a token's k choices and weights its routing weights; for tokens of
    other ranks k is 1, and only a permutation there and back remains.

    Saved are x itself, not its k copies, `fc1(x)`, and z of both projections: the backward gathers the rows of x and
    computes the gate again. Neither the input nor the output of fc2 is saved. With h = w gate(fc1(x)), the weights move
    in front of fc2 (it is linear), and their gradient
        dw[m,j] = sum_i dL/dh[n,i] gate[n,i]   (+ sum_o dL/dout[m,o] bias2[e,o])
    needs nothing else. Factors of higher precision are rounded as those of linears (`layers.rounded`), and their
    gradients are returned in it. Gradients of the projections: `wings.experts.products.backward_rows`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor | None,
        index: Tensor,
        places: Tensor,
        counts: RowCounts,
        gate: Callable[[Tensor], Tensor],
        fc1: products.Projection,
        fc2: products.Projection,
        *factors: Tensor | None,
    ) -> Tensor:
        ctx.dtypes = [None if factor is None else factor.dtype for factor in factors]  # of their gradients
        factors = tuple(None if factor is None else rounded(factor, x.dtype) for factor in factors)
        a1, b1, a2, b2 = factors
        up, zt1 = products.forward_rows(x, fc1, counts, a1, b1, index=index)
        if fc1.bias is not None:
            up += products.bias_of_rows(fc1.bias, counts, up.dtype)
        row_weights = None if weights is None else products.by_row(weights, places)
        h = _weighted(gate(up), row_weights)
        y, zt2 = products.forward_rows(h, fc2, counts, a2, b2)
        if fc2.bias is not None:
            y += _weighted(products.bias_of_rows(fc2.bias, counts, y.dtype), row_weights)
        needs_a1, needs_b1, needs_a2, needs_b2 = ctx.needs_input_grad[-4:]
        # h and the weights' gradient follow from fc1(x); the frozen matrices alone need nothing of the forward.
        needs_h = ctx.needs_input_grad[0] or ctx.needs_input_grad[1] or needs_a1 or needs_b1 or needs_a2
        needed = x if needs_a1 else None, up if needs_h else None, zt1 if needs_b1 else None, zt2 if needs_b2 else None
        ctx.save_for_backward(row_weights, index, places, *needed, *factors)
        ctx.gate, ctx.fc1, ctx.fc2, ctx.counts = gate, fc1, fc2, counts
        ctx.is_lifted = is_lifted()  # a backward may run after the block that lifts
        return products.sum_rows(y, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        row_weights, index, places, x, up, zt1, zt2, a1, b1, a2, b2 = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad[:2]
        needs_a1, needs_b1, needs_a2 = ctx.needs_input_grad[-4:-1]
        needs_up = needs_x or needs_a1 or needs_b1
        # places is a permutation of the N rows, and index says whose each is: the gradient of a sum is its copy.
        g = grads[0].index_select(0, index)
        dx = dw = da1 = db1 = None
        h: Any = None
        # The gate is the model's code: autograd differentiates it, over the rows of this layer alone.
        with torch.enable_grad(), lift(ctx.is_lifted):
            if up is not None:
                up = up.detach().requires_grad_(needs_up)
                row_weights = None if row_weights is None else row_weights.detach().requires_grad_(needs_w)
                h = _weighted(ctx.gate(up), row_weights)
        dh, da2, db2 = products.backward_rows(
            g, h.detach() if needs_a2 else None, zt2, ctx.fc2, ctx.counts, a2, b2, needs_dx=needs_up or needs_w
        )
        needed = [t for t in (up if needs_up else None, row_weights if needs_w else None) if t is not None]
        found = list(torch.autograd.grad([h], needed, [dh])) if needed else []
        del h, dh  # `[N, I]` each, before fc1's gradient needs as much
        if needs_w:
            dw_rows = found.pop()
            if ctx.fc2.bias is not None:
                dw_rows += (g * products.bias_of_rows(ctx.fc2.bias, ctx.counts, g.dtype)).sum(1).to(dw_rows.dtype)
            dw = dw_rows[places]  # from sorted rows back to the choices of each token
        del g
        if needs_up:
            dx, da1, db1 = products.backward_rows(
                found[0], x, zt1, ctx.fc1, ctx.counts, a1, b1, index=index, needs_dx=needs_x
            )
            dx = None if dx is None else products.sum_rows(dx, places)
        scales = [ctx.fc1.scale] * 2 + [ctx.fc2.scale] * 2
        return dx, dw, None, None, None, None, None, None, *products.finished([da1, db1, da2, db2], scales, ctx.dtypes)


def _weighted(rows: Tensor, row_weights: Tensor | None) -> Tensor:
    """`[N, I]` times `[N]`, in the dtype of the rows."""
    return rows if row_weights is None else (rows * row_weights.unsqueeze(1)).to(rows.dtype)
