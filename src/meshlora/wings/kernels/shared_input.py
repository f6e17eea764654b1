"""One input of several linears (q, k, v; gate, up): one product with all their A, and one tensor for its gradient.

Owns: `share`, which gives linears that are called with the same tensor a common node in the graph, the products with A
there, and the tensor in which they accumulate the gradient of the input. Does not own: these linears
(`wings.kernels.entrance`).

Without it each linear reads x for its own x A^T, and again for its own dA, allocates its own gradient `[T, in]`, and
autograd adds these: a write, two reads and a write more for each further linear. Here

    forward     [z_1 | ... | z_n] = s x [A_1; ...; A_n]^T
    backward    dx = sum_k g_k W_k + s [dz_1 | ... | dz_n] [A_1; ...; A_n],   [dA_1; ...; dA_n] = s [dz_1 | ...]^T x
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshlora.layers.notes import note, noted
from meshlora.layers.rounded import rounded, scaled_product, wide_product
from meshlora_ground.compat.torch_tensors import running_backward


class InputGradient:
    """The gradient of one input, as accumulated so far by linears in the running backward."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._backward = -1

    def hold(self, total: Tensor) -> None:
        """Keep the sum `total` `[T, in]`: that of `so_far`, updated in place, or the first term."""
        self._sum = total

    def so_far(self) -> Tensor | None:
        """The sum of the running backward, ignoring one that was aborted before it reached the input. The caller must
        call `hold` next."""
        is_other, self._backward = self._backward != running_backward(), running_backward()
        return None if is_other else self._sum

    def take(self) -> Tensor | None:
        """The sum `[T, in]` of the running backward; cleared by the call."""
        found = self._sum if self._backward == running_backward() else None
        self._sum = None
        return found


class ShareFunction(Function):
    """forward: an empty tensor, as a node of the graph after x, and each s x A^T.

    backward: the gradient accumulated for x and the terms of these products; those of the factors whose z was used.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: InputGradient, scale: float, *factors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradient, ctx.shape, ctx.scale, ctx.dtypes = gradient, x.shape, scale, [a.dtype for a in factors]
        ctx.set_materialize_grads(False)  # a z that nobody used has no gradient: None, not zeros
        if not factors:
            # No view of x: that would keep x alive, and x its notes, for ever.
            return (x.new_empty(0),)
        every = torch.cat([rounded(a, x.dtype) for a in factors])
        ctx.widths = [len(a) for a in factors]
        x2 = x.detach().view(-1, x.shape[-1])  # without the notes of x, as above
        ctx.save_for_backward(x2 if any(ctx.needs_input_grad[3:]) else None, every)
        return x.new_empty(0), *scaled_product(x2, every.T, scale).split(ctx.widths, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, dzs = ctx.gradient.take(), [dz for dz in grads[1:] if dz is not None]
        das: list[Tensor | None] = [None] * len(grads[1:])
        if dzs:
            x, every = ctx.saved_tensors
            # One of them may have been called with another tensor, or be frozen: its rows take no part.
            used = [place for place, dz in enumerate(grads[1:]) if dz is not None]
            if len(used) < len(das):
                parts = every.split(ctx.widths)
                every = torch.cat([parts[place] for place in used])
            dz = torch.cat(dzs, 1).mul_(ctx.scale)
            dx = dz @ every if dx is None else dx.addmm_(dz, every)
            if x is not None:
                found = wide_product(dz.mT, x, ctx.dtypes[used[0]]).split([ctx.widths[place] for place in used])
                for place, da in zip(used, found, strict=True):
                    das[place] = da if ctx.needs_input_grad[3 + place] else None
        return None if dx is None else dx.view(ctx.shape), None, None, *das


class SharedInput(NamedTuple):
    """The note on a shared input.

    gradient: where linears accumulate its gradient. token: `[0]`, passed to each linear with the detached input: by it
    the input's gradient waits for all of them. zs: linear -> its s x A^T `[T, r]`, where it was computed here.
    backward: that in which it was made, as layers are computed again, -1: in none.
    """

    gradient: InputGradient
    token: Tensor
    zs: Mapping[nn.Module, Tensor]
    backward: int


class Joined(NamedTuple):
    """Linears whose products with A are computed together. factors: A of each. scale: s of all."""

    leaves: Sequence[nn.Module]
    factors: Sequence[Tensor]
    scale: float


def share(x: Tensor, joined: Joined | None = None) -> SharedInput | None:
    """The note shared by all linears that are called with this very tensor, unchanged.

    joined: those of them that are to have their products with A; the first call for x decides.

    None if there is nothing to share: without a graph, or for a leaf, which its own node would keep alive for ever.
    """
    if not torch.is_grad_enabled() or x.grad_fn is None:  # none has a gradient to share
        return None
    found = noted(x, SharedInput)
    # The input of a layer that is computed again is the tensor of the first time, and must save what it saved then.
    if found is None or found.backward != running_backward():
        gradient = InputGradient()
        leaves, factors, scale = joined or Joined((), (), 1.0)
        token, *zs = ShareFunction.apply(x, gradient, scale, *factors)
        found = note(x, SharedInput(gradient, token, dict(zip(leaves, zs, strict=True)), running_backward()))
    return found
