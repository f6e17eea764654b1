"""Sums of the residual stream with a linear's low-rank term and the norm after them: `model.kernels: fused`.

Owns: what the two operators compute, by definition on CPUs and by kernels on GPUs; the decoder layers that call them,
and when they do. Does not own: the Triton kernels (`wings.kernels.stream_kernels`), frozen products (`layers.frozen`),
the other kernels (`wings.kernels.liger`).

A layer adds what o_proj, and then down_proj, returns to its stream, and a norm reads the sum: a low-rank product that
reads and writes y `[T, H]` again, an addition and a norm. Here the linear gives its frozen product y alone, and one
operator does the rest:

    h = y + z B^T + residual,  n = w (h r),  r = (mean(h^2) + eps)^-1/2

and backward, from the gradients d_n of n and d of h, which the next sum has:

    dh = d + r w d_n - h r^3 / H sum_j h_j w_j d_nj,  dz = s dh B

Sums are float32 (float64 of float64); h, n, dh and dz are rounded once, n before w too, as the norm has it, and what
follows takes them rounded. H is whole: over tp y is a term of a sum, and nothing is added to it before that.

The sum and the norm are two nodes of the graph, as the gradient of h between them is what every reader of h expects:
the first computes n, the second gives it out, and the gradient's kernel, which is the second's, hands dz to the first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshlora.layers.frozen import FewBits, gradient_of_input
from meshlora.layers.linear import ParallelLinear
from meshlora.layers.notes import forget, note, noted
from meshlora.layers.products import SharedGradient
from meshlora.layers.rounded import rounded, scaled_product, wide_product
from meshlora.wings.kernels.known_code import decorated_as, digest
from meshlora.wings.kernels.tails import MOST_RANK, frozen_product, plain_adapter
from meshlora_ground.compat.torch_tensors import tensor_without_storage
from meshlora_ground.errors import UnsupportedError

# `digest` of `LlamaDecoderLayer.forward` of transformers 5.23, which is that of 66 classes more.
_LAYER = "015580e5443c6d2a"
_NORMS = ("input_layernorm", "post_attention_layernorm")


class StreamKernels(NamedTuple):
    """The two operators, of all rows at once: as `stream_sum` and `stream_back` below."""

    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    back: Callable[..., tuple[Tensor, Tensor]]


# --- the layers -------------------------------------------------------------------------------------------------------


class KnownLayer(NamedTuple):
    """A decoder layer whose code is known. after: the norm that reads its output, of the layer `below`, where that is
    known too; of none: it is the model's last norm."""

    path: str
    layer: nn.Module
    after: nn.Module | None
    below: nn.Module | None


def known_layers(model: nn.Module, is_norm: Callable[[Any], bool]) -> list[KnownLayer]:
    """The decoder layers of `model` that are Llama's, statement by statement. is_norm: whether a norm is."""
    found = []
    for path, stack in model.named_modules():
        if not isinstance(stack, nn.ModuleList):
            continue
        owner = model.get_submodule(path.rpartition(".")[0])
        for index, layer in enumerate(stack):
            if not _is_known(layer, is_norm):
                continue
            below = stack[index + 1] if index + 1 < len(stack) else None
            after = getattr(owner, "norm", None) if below is None else getattr(below, "input_layernorm", None)
            if not is_norm(after) or (below is not None and "forward" in vars(below)):  # which is of another stage
                after = None
            found.append(KnownLayer(f"{path}.{index}", layer, after, below))
    return found


def _is_known(layer: nn.Module, is_norm: Callable[[Any], bool]) -> bool:
    forward: Any = type(layer).forward
    is_layer = digest(inspect.unwrap(forward), may_be_decorated=True) == _LAYER
    if not is_layer or decorated_as(forward, forward) is None:
        return False
    norms = [getattr(layer, name, None) for name in _NORMS]
    return "forward" not in vars(layer) and all(map(is_norm, norms))


def layer_forward(known: KnownLayer, kernels: StreamKernels, *, has_gate: bool) -> Any:
    """The forward of a layer. has_gate: whether its MLP is a gated one that has low-rank terms in its gate."""
    decorated: Any = type(known.layer).forward
    original = inspect.unwrap(decorated)

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": past_key_values}
        given |= {"use_cache": use_cache, "position_embeddings": position_embeddings, **kwargs}
        if not torch.is_grad_enabled() or not hidden_states.numel():
            return original(self, hidden_states, **given)
        residual, normed = _through(self.input_layernorm, hidden_states)
        with _unfinished(self.self_attn.o_proj, self.post_attention_layernorm):
            attended, _ = self.self_attn(hidden_states=normed, **given)
        hidden_states = _added(residual, attended, self.post_attention_layernorm, kernels)
        residual, normed = _through(self.post_attention_layernorm, hidden_states)
        after, below = known.after if has_gate else None, known.below
        if below is not None and below.training and getattr(below, "gradient_checkpointing", False):
            after = None  # its norm is computed again, and would look for this result a second time
        with _unfinished(getattr(self.mlp, "down_proj", None), after):
            found = self.mlp(normed)
        return _added(residual, found, after, kernels)

    return decorated_as(decorated, forward)


class Unfinished(Tensor):
    """What a linear returns inside of a layer that finishes it: no numbers, and an error for whoever reads some."""

    leaf: ParallelLinear
    x: Tensor

    @staticmethod
    def __new__(cls, leaf: ParallelLinear, x: Tensor) -> Unfinished:
        found = tensor_without_storage(cls, (*x.shape[:-1], leaf.out_features), dtype=x.dtype, device=x.device)
        found.leaf, found.x = leaf, x
        return found

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        rule = f"model.kernels: fused computes it with the sum after it, and {func} reads it"
        raise UnsupportedError("a linear's output", rule, "use model.kernels: liger")


@contextmanager
def _unfinished(leaf: Any, norm: nn.Module | None) -> Iterator[None]:
    """Inside, `leaf` returns an `Unfinished`, if the sum after it may have its low-rank term."""
    if norm is None or not _may_finish(leaf, norm):
        yield
        return
    leaf.forward = MethodType(Unfinished, leaf)
    try:
        yield
    finally:
        del leaf.forward


def _may_finish(leaf: Any, norm: Any) -> bool:
    name = plain_adapter(leaf)
    if name is None or leaf.tp.size > 1 or leaf.dropout.get(name) or "forward" in vars(leaf):
        return False
    weight = norm.weight
    if weight.requires_grad or leaf.out_features != len(weight):
        return False
    return len(leaf.factor_a(name)) <= MOST_RANK


def _added(residual: Tensor, found: Tensor, norm: Any, kernels: StreamKernels) -> Tensor:
    """`residual + found`, with the result of `norm` noted on it where the kernels have it."""
    if not isinstance(found, Unfinished):
        return residual + found
    leaf, x = found.leaf, found.x
    name = leaf.in_use
    entered = leaf.enter(leaf, x)
    is_other = entered.take_dz is not None or entered.source is not None
    if name is None or is_other or not residual.dtype == x.dtype == norm.weight.dtype:
        return residual + type(leaf).forward(leaf, x)
    a, scale = (leaf.factor_a(name), leaf.scaling[name]) if entered.z is None else (None, 1.0)
    ready = Ready(norm, kernels)
    inputs = entered.x, entered.token, leaf.frozen_weight, leaf.bias, entered.z
    h: Tensor = SumFunction.apply(*inputs, a, leaf.factor_b(name), residual, (scale, entered.gradient, ready))
    note(h, ready)
    return h


class _Passed(NamedTuple):
    """The note on n: the stream as the next sum takes it, whose gradient the norm's kernel adds."""

    stream: Tensor


def _through(norm: nn.Module, h: Tensor) -> tuple[Tensor, Tensor]:
    """The stream for the next sum, and `norm(h)`."""
    n = norm(h)
    passed = noted(n, _Passed)
    if passed is None:
        return h, n
    forget(n, _Passed)
    return passed.stream, n


def ready_norm(norm: nn.Module, h: Tensor) -> Tensor | None:
    """`norm(h)`, if it was computed with h."""
    ready = noted(h, Ready)
    if ready is None or ready.norm is not norm:
        return None
    forget(h, Ready)
    n, stream = NormFunction.apply(h, ready.norm.weight, ready)
    note(n, _Passed(stream))
    found: Tensor = n
    return found


# --- the graph --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Ready:
    """The note on a sum h, between the two nodes. norm: whose result n is, with its r; b, scale: of the linear before.
    handed: dh, and dz of it, in a backward."""

    norm: Any
    kernels: StreamKernels
    n: Tensor | None = None
    r: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    handed: tuple[Tensor, Tensor] | None = None

    def dz(self, g: Tensor) -> Tensor | None:
        """dz of g, if the norm's backward has given out this very gradient: nobody else has read h."""
        handed, self.handed = self.handed, None
        return handed[1] if handed is not None and handed[0] is g else None


class SumFunction(Function):
    """`h = x W^T + b + z B^T + residual`, z given or `s x A^T`; see the module. W and b are frozen.

    backward, with g = dL/dh: dz = s g B, dB = g^T z, dA = dz^T x, dx = g W + dz A, and g for the residual. Of a z that
    is given s is in it, and dz its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token: Tensor | None,
        weight: Tensor | FewBits,
        bias: Tensor | None,
        z: Tensor | None,
        a: Tensor | None,
        b: Tensor,
        residual: Tensor,
        how: tuple[float, SharedGradient | None, Ready],
    ) -> Tensor:
        scale, ctx.gradient, ready = how
        ctx.dtypes, b = (a.dtype if a is not None else x.dtype, b.dtype), rounded(b, x.dtype)
        x2 = x.reshape(-1, x.shape[-1])
        if a is not None:
            a = rounded(a, x.dtype)
            z = scaled_product(x2, a.T, scale)
        assert z is not None
        y = frozen_product(x2, weight, bias)
        norm = ready.norm.weight, ready.norm.variance_epsilon
        h, ready.n, ready.r = ready.kernels.forward(y, z, b, residual, *norm)
        ready.b, ready.scale = b, scale
        ctx.packed = weight if isinstance(weight, FewBits) else None
        kept = x2 if ctx.needs_input_grad[5] else None  # for dA alone
        ctx.save_for_backward(None if isinstance(weight, FewBits) else weight, z, a, b, kept)
        ctx.scale, ctx.ready, ctx.shape = scale, ready, x.shape
        return h  # no view: some models change it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plain, z, a, b, x = ctx.saved_tensors
        weight = plain if ctx.packed is None else ctx.packed
        g = grads[0].reshape(-1, grads[0].shape[-1])
        dz = ctx.ready.dz(grads[0])
        if dz is None:
            dz = scaled_product(g, b, ctx.scale)
        da = None if x is None else wide_product(dz.mT, x, ctx.dtypes[0])
        db = wide_product(g.mT, z, ctx.dtypes[1]) if ctx.needs_input_grad[6] else None
        dx = _gradient_of_x(ctx, g, weight, dz, a)
        return dx, None, None, None, dz if a is None else None, da, db, grads[0], None


def _gradient_of_x(ctx: Any, g: Tensor, weight: Tensor | FewBits, dz: Tensor, a: Tensor | None) -> Tensor | None:
    """`g W + dz A`; None where it is added to that of other linears."""
    shared: SharedGradient | None = ctx.gradient
    if shared is None and not ctx.needs_input_grad[0]:
        return None
    total = None if shared is None else shared.so_far()
    adds_last = isinstance(weight, FewBits) and weight.has_backward  # its own product adds to nothing
    if adds_last:
        total = gradient_of_input(g, weight, total)
    if a is not None:
        total = dz @ a if total is None else total.addmm_(dz, a)
    if not adds_last:
        total = gradient_of_input(g, weight, total)
    assert total is not None
    if shared is None:
        return total.view(ctx.shape)
    shared.hold(total)
    return None


class NormFunction(Function):
    """h -> n, computed with it, and h again, for the sum that comes next."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, ready: Ready) -> tuple[Tensor, Tensor]:
        n = ready.n
        assert n is not None
        ctx.save_for_backward(h, weight, ready.r, ready.b)
        ctx.ready, ready.n, ready.r, ready.b = ready, None, None, None
        ctx.set_materialize_grads(False)  # nobody may add to h again, as after the last norm
        return n, h.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        of_n, passed = grads
        if of_n is None:
            return passed, None, None
        h, weight, r, b = ctx.saved_tensors
        rows = [None if grad is None else grad.reshape(-1, grad.shape[-1]).contiguous() for grad in (of_n, passed)]
        inner = h.reshape(-1, h.shape[-1])
        dh, dz = ctx.ready.kernels.back(*rows, inner, weight, r, b, ctx.ready.scale)
        dh = dh.view(h.shape)
        ctx.ready.handed = dh, dz
        return dh, None, None


# --- operators --------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("meshlora", "FRAGMENT")
# y `[T, H]`; z `[T, r]`; B `[H, r]`; residual `[..., H]`; weight `[H]` -> h, n `[..., H]`; r `[T]`, float32.
_SUM = "Tensor y, Tensor z, Tensor b, Tensor residual, Tensor weight, float eps"
_LIBRARY.define(f"stream_sum({_SUM}) -> (Tensor, Tensor, Tensor)")
# Gradients of n and of h, None where h has none of its own -> dh `[T, H]`, dz `[T, r]`.
_BACK = "Tensor grad, Tensor? passed, Tensor h, Tensor weight, Tensor r, Tensor b, float scale"
_LIBRARY.define(f"stream_back({_BACK}) -> (Tensor, Tensor)")


def _by_definition(
    y: Tensor, z: Tensor, b: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(y.dtype, torch.float32)
    shape = residual.shape
    h = (y.to(wide).view(shape) + (z.to(wide) @ b.to(wide).T).view(shape) + residual.to(wide)).to(y.dtype)
    r = (h.to(wide).square().mean(-1, keepdim=True) + eps).rsqrt()
    return h, (h.to(wide) * r).to(y.dtype) * weight, r.flatten()


def _back_by_definition(
    grad: Tensor, passed: Tensor | None, h: Tensor, weight: Tensor, r: Tensor, b: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    of_n, x, r = grad.to(r.dtype) * weight.to(r.dtype), h.to(r.dtype), r.unsqueeze(1)
    dh = r * of_n - x * (r**3 * (of_n * x).mean(1, keepdim=True))
    if passed is not None:
        dh += passed.to(r.dtype)
    dh = dh.to(h.dtype)
    return dh, (scale * (dh.to(r.dtype) @ b.to(r.dtype))).to(h.dtype)


def _on_gpu(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    from meshlora.wings.kernels import stream_kernels  # which needs Triton

    h, n, r = _shapes(*given)
    stream_kernels.stream_sum(*given, h, n, r)
    return h, n, r


def _back_on_gpu(*given: Any) -> tuple[Tensor, Tensor]:
    from meshlora.wings.kernels import stream_kernels

    found = _back_shapes(*given)
    stream_kernels.stream_back(*given, *found)
    return found


def _shapes(y: Tensor, z: Any, b: Any, residual: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = residual.shape
    return y.new_empty(shape), y.new_empty(shape), y.new_empty(len(y), dtype=torch.float32)


def _back_shapes(
    grad: Tensor, passed: Any, h: Tensor, weight: Any, r: Any, b: Tensor, _: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h), h.new_empty(len(h), b.shape[1])


_LIBRARY.impl("stream_sum", _by_definition, "CPU")
_LIBRARY.impl("stream_back", _back_by_definition, "CPU")
_LIBRARY.impl("stream_sum", _on_gpu, "CUDA")
_LIBRARY.impl("stream_back", _back_on_gpu, "CUDA")
_LIBRARY.impl("stream_sum", _shapes, "Meta")
_LIBRARY.impl("stream_back", _back_shapes, "Meta")


def stream_kernels() -> StreamKernels:
    """The two operators."""
    return StreamKernels(torch.ops.meshlora.stream_sum, torch.ops.meshlora.stream_back)
