"""The linear layer with LoRA on a mesh: column-parallel, row-parallel or whole.

Owns: forward and backward of `y = x W^T + b + s (x A^T) B^T` with W frozen, in one autograd function, and the module
that holds the local parts of W, A and B. Does not own: where regions begin (`parallel.region`), how factors are drawn
(`adapter.initialization`).

Column-parallel layers communicate nothing. A row-parallel layer adds its base and LoRA terms locally and reduces the
sum once; the bias is added after that, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from meshlora.parallel.collectives import reduce_each_to_one, reduce_scatter_each_to_each
from meshlora.parallel.groups import Axis
from meshlora.plan.rules import LinearRule, Split


class LoraLinearFunction(Function):
    """`y = x W^T + b + s z B^T`, `z = x A^T`; shapes x `[T, in]`, W `[out, in]`, A `[r, in]`, B `[out, r]`.

    forward: y[t,o] = sum_i x[t,i] W[o,i] + b[o] + s sum_r z[t,r] B[o,r]
    backward, with g = dL/dy:
        dz = s g B          `[T, r]`
        dA = dz^T x         `[r, in]`
        dB = s g^T z        `[out, r]`
        dx = g W + dz A     `[T, in]`
    W and b are frozen: no gradient is computed for them, and x is saved for dA alone.
    The factors may be of higher precision than x (fp32 beside bf16): they are rounded on use, their gradients are not
    kept in the lower precision.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        x2 = x.reshape(-1, x.shape[-1])
        y = F.linear(x, weight, bias)  # not a view: some models change it in place
        z = x2 @ a.to(x.dtype).T
        y.view(-1, y.shape[-1]).addmm_(z, b.to(x.dtype).T, alpha=scale)
        ctx.save_for_backward(x2, weight, a, b, z)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, z = ctx.saved_tensors
        shape = (*grads[0].shape[:-1], weight.shape[1])
        g = grads[0].reshape(-1, weight.shape[0])
        dz = (g @ b.to(g.dtype)).mul_(ctx.scale)
        dx = da = db = None
        if ctx.needs_input_grad[3]:
            da = (dz.T @ x).to(a.dtype)
        if ctx.needs_input_grad[4]:
            db = (g.T @ z).to(b.dtype).mul_(ctx.scale)
        if ctx.needs_input_grad[0]:
            dx = (g @ weight).addmm_(dz, a.to(g.dtype)).view(shape)
        return dx, None, None, da, db, None


class ParallelLinear(nn.Module):
    """A frozen linear of the base model with its adapters, as this rank holds it.

    Attributes:
        rule: the whole matrix and how it is split.
        weight: local part of W, `[out/tp, in]` (column), `[out, in/tp]` (row) or `[out, in]` (whole); frozen.
        bias: `[out/tp]` (column) or `[out]` (row, whole), or None; frozen.
        lora_A, lora_B: adapter name -> local factor.
        scaling: adapter name -> s.
        active: the adapter in use, None for the base alone.
        scatters_tokens: under sp, whether the output leaves as this rank's slice of the tokens.
    """

    def __init__(
        self, rule: LinearRule, tp: Axis, *, scatters_tokens: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.rule, self.tp, self.scatters_tokens = rule, tp, scatters_tokens
        self.in_features = rule.in_features // (tp.size if rule.split is Split.ROW else 1)
        self.out_features = rule.out_features // (tp.size if rule.split is Split.COLUMN else 1)
        empty = torch.empty(self.out_features, self.in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.register_parameter("bias", None)
        if rule.has_bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype, device=device), requires_grad=False)
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.scaling: dict[str, float] = {}
        self.active: str | None = None

    def add_adapter(self, name: str, factors: Mapping[str, Tensor], *, scaling: float) -> None:
        """Attach the local factors `{"A": [r, in_local], "B": [out_local, r]}` as adapter `name`; frozen until set."""
        a, b = factors["A"], factors["B"]
        assert a.shape[1] == self.in_features, (self.rule, a.shape)
        assert b.shape == (self.out_features, a.shape[0]), (self.rule, b.shape, a.shape)
        self.lora_A[name] = nn.Parameter(a, requires_grad=False)
        self.lora_B[name] = nn.Parameter(b, requires_grad=False)
        self.scaling[name] = scaling

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., in_local]` -> y `[..., out_local]`; a row layer returns the sum over tp."""
        is_row = self.rule.split is Split.ROW
        bias = None if is_row else self.bias
        name = self.active
        if name is not None and name in self.lora_A:
            y = LoraLinearFunction.apply(x, self.weight, bias, self.lora_A[name], self.lora_B[name], self.scaling[name])
        else:
            y = F.linear(x, self.weight, bias)
        return self._leave_region(y) if is_row else y

    def _leave_region(self, y: Tensor) -> Tensor:
        """y `[B, S, out]`, one term of the sum -> `[B, S, out]`, or under sp `[1, B*S/tp, out]`."""
        if self.scatters_tokens:
            y = reduce_scatter_each_to_each(y.reshape(-1, y.shape[-1]), self.tp).unsqueeze(0)
        else:
            y = reduce_each_to_one(y, self.tp)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.rule.split}, {self.in_features} -> {self.out_features}, adapters={list(self.lora_A)}"
