"""A stand-in for liger-kernel on CPUs: the contract of `layers.liger.Kernels` in torch, writing where it writes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.wings.kernels.liger import Gate, Kernels


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _norm(x: Tensor, weight: Tensor, eps: float, offset: float, is_wide: bool) -> tuple[Tensor, Tensor]:
    r = (_wide(x).square().mean(-1, keepdim=True) + eps).rsqrt()
    n = _wide(x) * r
    y = n * (offset + _wide(weight)) if is_wide else n.to(x.dtype) * weight
    return y.to(x.dtype), r


def _norm_back(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor, offset: float, is_wide: bool) -> Tensor:
    h, wide = _wide(grad) * (offset + _wide(weight)), _wide(x)
    return (r * h - wide * r**3 * (h * wide).mean(-1, keepdim=True)).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens = x.transpose(1, 2).contiguous()  # whole tokens: no copy if they are
    x1, x2 = tokens.chunk(2, -1)
    turned = tokens * cos.unsqueeze(2) + torch.cat([-x2, x1], -1) * sin.unsqueeze(2)
    return tokens.copy_(turned).transpose(1, 2)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autograd._unsafe_preserve_version_counter((q, k)):  # a kernel of Triton tells autograd nothing
        return _turned(q, cos, sin), _turned(k, cos, sin)


def _rotate_back(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate(dq, dk, cos, -sin)


def _gate(act: Callable[[Tensor], Tensor]) -> Gate:
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return act(gate.float()).to(up.dtype) * up

    def back(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = gate.detach().float().requires_grad_()
            activated = act(leaf)
        (d_gate,) = torch.autograd.grad(activated, leaf, grad.float() * up.float())
        with torch.autograd._unsafe_preserve_version_counter((gate, up)):
            return gate.copy_(d_gate), up.copy_(grad * activated.detach().to(up.dtype))

    return Gate(forward, back, act)


STAND_IN = Kernels(
    _norm,
    _norm_back,
    _rotate,
    _rotate_back,
    {"silu": _gate(F.silu), "gelu_tanh": _gate(lambda x: F.gelu(x, approximate="tanh"))},
)


def stand_in() -> None:
    """Let this process take the stand-in for liger-kernel. Called on ranks of a pool, too."""
    from meshlora.wings.kernels import kernels

    kernels.liger = lambda _: STAND_IN  # type: ignore[attr-defined]


def real_kernels() -> None:
    """Let this process take liger-kernel as it is, on a CPU by the interpreter of Triton."""
    import pytest

    from meshlora.wings.kernels import kernels
    from tests.interpreted import interpreted

    found = interpreted(pytest.MonkeyPatch())
    kernels.liger = lambda _: found  # type: ignore[attr-defined]
