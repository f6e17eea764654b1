"""RMS norms with a frozen weight: the same forward, and a backward with fewer passes over the tokens.

Owns: finding the norms whose code is Llama's, their gradient, and what they save; the hook on norms over a width that
is split over tp. Does not own: which norms those are (`plan.families.explicit`); norms of another kind, which stay the
model's own.

transformers writes it as six operations. Their backward takes twelve passes over `[T, H]`, and in a bfloat16 model they
save the input in float32. Written out it takes five passes, and the input is saved in its own dtype. On a GPU torch has
a kernel for each direction.
"""

from __future__ import annotations

from types import CodeType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import silu

from meshlora.comm.collectives import reduce_each_to_each
from meshlora.comm.groups import Axis
from meshlora.plan.layout import Layout
from meshlora.wings.kernels.known_code import digest
from meshlora.wings.kernels.liger import Kernels
from meshlora_ground.compat import fused_norm, fused_norm_back
from meshlora_ground.errors import UnsupportedError
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
    code = getattr(kind.forward, "__code__", None)
    return isinstance(code, CodeType) and digest(code) == _LLAMAS


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    if torch.is_grad_enabled() and hidden_states.requires_grad and not self.weight.requires_grad:
        return RmsNormFunction.apply(hidden_states, self.weight, self.variance_epsilon)
    original: Tensor = type(self).forward(self, hidden_states)
    return original


def widen_norm(module: nn.Module, layout: Layout, axis: Axis, *, name: str) -> None:
    """Make an RMS norm of the local width normalise over the whole one. One sum of `[T, 1]` per direction.

    The model's own forward normalises by its local mean m_i; y_i sqrt(m_i + eps) / sqrt(m + eps) is the result of the
    whole norm, with the mean m over the whole width. The rest of the norm (its weight, its casts) is unchanged. A gate,
    the norm's second argument, is applied before it unless the module's `norm_before_gate` says otherwise.

    layout: of the whole width; its groups are normalised apart. axis: the ranks that hold a group.

    Raises:
        UnsupportedError: it is not an RMS norm whose epsilon is known.
    """
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float):
        raise UnsupportedError(f"{name}: {type(module).__name__}", "only RMS norms can be split over their width")
    (copies,) = layout.copies(axis.size * layout.groups)  # key/value heads held by several ranks count once
    width = layout.size // layout.groups * copies
    gates_first = not getattr(module, "norm_before_gate", False)

    def hook(_: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        x = args[0].to(torch.float32)
        if gates_first and len(args) > 1 and args[1] is not None:
            x = x * silu(args[1].to(torch.float32))
        squares = x.square().sum(-1, keepdim=True)
        mean = reduce_each_to_each(squares, axis) / width
        factor = torch.sqrt((squares / x.shape[-1] + eps) / (mean + eps))
        return y * factor.to(y.dtype)

    module.register_forward_hook(hook)
