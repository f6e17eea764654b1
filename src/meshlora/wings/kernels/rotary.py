"""Rotary embeddings: the rotation of queries and keys with half the passes over them.

Owns: finding the attentions whose rotation is Llama's, and computing it. Does not own: the angles, which stay the
model's; rotations of another kind.

transformers writes it as five operations for queries and five for keys, and autograd nine for each gradient. Written
for the two halves it is three each way: nothing is negated, joined or padded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from meshlora.wings.kernels.known_code import decorated_as, digest

_NAME = "apply_rotary_pos_emb"
# `digest` of the two functions behind the formula below: of transformers 5.23.
_ROTATION, _HALVES = "928b1b071cc104d5", "a68a16140f32af85"


class RotationFunction(Function):
    """y = x cos + [-x_2 | x_1] sin, with x_1 and x_2 the halves of the last dim; x `[B, h, S, d]`, cos and sin
    `[B, 1, S, d]`, which get no gradient.

    forward: y_1 = x_1 cos_1 - x_2 sin_1, y_2 = x_2 cos_2 + x_1 sin_2
    backward: dx_1 = g_1 cos_1 + g_2 sin_2, dx_2 = g_2 cos_2 - g_1 sin_1
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        y = x * cos
        (y1, y2), (x1, x2), (sin1, sin2) = (t.chunk(2, -1) for t in (y, x, sin))
        y1.addcmul_(x2, sin1, value=-1)
        y2.addcmul_(x1, sin2)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        dx = grads[0] * cos
        (dx1, dx2), (g1, g2), (sin1, sin2) = (t.chunk(2, -1) for t in (dx, grads[0], sin))
        dx1.addcmul_(g2, sin2)
        dx2.addcmul_(g1, sin1, value=-1)
        return dx, None, None


def own_rotations(model: nn.Module) -> None:
    """Give the rotation above to every attention of `model` whose own is known."""
    for module in model.modules():
        forward: Any = type(module).forward
        # Not one that is of another stage, or has kernels.
        if "forward" not in vars(module) and rotates(forward):
            module.forward = MethodType(with_rotation(forward, _rotated), module)


def with_rotation(forward: Any, rotated: Callable[[Any], Any]) -> Any:
    """`forward` with another rotation. rotated: transformers' function -> that which is called in its place."""
    own = inspect.unwrap(forward)
    names = {**own.__globals__, _NAME: rotated(own.__globals__[_NAME])}
    new = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    new.__kwdefaults__ = own.__kwdefaults__
    return decorated_as(forward, new)


def rotates(forward: Any) -> bool:
    """Whether this forward of a module calls the rotation that the formula above was written for."""
    own = inspect.unwrap(forward)
    if not isinstance(own, FunctionType) or _NAME not in own.__code__.co_names or decorated_as(forward, own) is None:
        return False
    rotation: Any = own.__globals__.get(_NAME)
    is_known = digest(rotation, may_be_decorated=True) == _ROTATION
    return is_known and digest(rotation.__globals__.get("rotate_half")) == _HALVES


def _rotated(original: Any) -> Any:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """As transformers' function of the name."""
        is_mixed = not q.dtype == k.dtype == cos.dtype == sin.dtype
        if is_mixed or cos.requires_grad or q.shape[-1] % 2 or not q.shape[-1] == k.shape[-1] == cos.shape[-1]:
            return original(q, k, cos, sin, unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return RotationFunction.apply(q, cos, sin), RotationFunction.apply(k, cos, sin)

    return rotate
