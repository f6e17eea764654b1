"""RMS norms with a frozen weight: the same forward, and a backward with fewer passes over the tokens.

Owns: finding the norms whose code is Llama's, their gradient, and what they save. Does not own: norms of another kind,
which stay the model's own; norms over a width that is split over tp (`model.wide_norm`).

transformers writes it as six operations. Their backward takes twelve passes over `[T, H]`, and in a bfloat16 model they
save the input in float32. Written out it takes five passes, and the input is saved in its own dtype. On a GPU torch has
a kernel for each direction.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshlora.wings.kernels.known_code import digest
from meshlora.wings.kernels.liger import Kernels
from meshlora_ground.compat.torch_fused import fused_norm, fused_norm_back
from meshlora_ground.float64 import is_lifted

# `digest` of the code behind the formula below: `LlamaRMSNorm.forward` of transformers 5.23.
_LLAMAS = "0dcf5f011ba2ed45"


class RmsNormFunction(Function):
    """y = w * n, n = x r, r = (mean(x^2) + eps)^-1/2 over the last dim; x `[..., H]`, w `[H]`.

    forward: operation by operation what `LlamaRMSNorm` computes, in float32 (lifted float64: in float64). A kernel has
    float32 inside too, and n is rounded before w as there. kernels: with that of a package, which has w in it too.
    backward, with g = dL/dy and h = g w:
        dx_i = r h_i - x_i r^3 / H sum_j h_j x_j
    w is frozen: no gradient is computed for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernels: Kernels | None = None) -> Tensor:
        ctx.is_fused = _has_kernel(x, weight)
        if kernels is not None:
            y, r = kernels.norm(x, weight, eps, 0.0, False)
            ctx.save_for_backward(x, weight, r)
            return y
        if ctx.is_fused:
            n, r = fused_norm(x, eps)
            ctx.save_for_backward(x, weight, r)
            return n.mul_(weight)
        wide = torch.float64 if x.dtype == torch.float64 and is_lifted() else torch.float32
        x_wide = x.to(wide)
        r = torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, r)
        n = (x_wide * r).to(x.dtype)
        return n.mul_(weight) if weight.dtype == n.dtype else weight * n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight, r = ctx.saved_tensors
        if ctx.is_fused:
            return fused_norm_back(grads[0], x, weight, r), None, None, None
        x_wide = x.to(r.dtype)
        h = grads[0].to(r.dtype) * weight.to(r.dtype)
        dot = torch.linalg.vecdot(h, x_wide).unsqueeze(-1)
        h.mul_(r).addcmul_(x_wide, r.pow(3).mul_(dot), value=-1 / x.shape[-1])
        return h.to(x.dtype), None, None, None


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch computes the norm in one kernel: on a CPU it has none, and in float64 not this one's float32."""
    return not x.is_cpu and x.dtype == weight.dtype != torch.float64


def own_gradients_of_norms(model: nn.Module) -> None:
    """Give the backward above to every norm of `model` whose code is known."""
    for module in model.modules():
        if is_known(type(module)) and "forward" not in vars(module):  # else it is of another stage
            module.forward = MethodType(_forward, module)


def is_known(kind: type[nn.Module]) -> bool:
    """Whether a module of `kind` computes, statement by statement, what the formula above was written for."""
    return digest(kind.forward) == _LLAMAS


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not self.weight.requires_grad:
        return RmsNormFunction.apply(hidden_states, self.weight, self.variance_epsilon)
    return type(self).forward(self, hidden_states)
