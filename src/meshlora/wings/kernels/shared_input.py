"""One input of several linears (q, k, v; gate, up): one product with all their A, and one tensor for its gradient.

Owns: `share`, which gives linears that are called with the same tensor a common node in the graph, the products with A
there, and the tensor in which they accumulate the gradient of the input. Does not own: these linears
(`wings.kernels.entrance`).

Without it each linear reads x for its own x A^T, and again for its own dA, allocates its own gradient `[T, in]`, and
autograd adds these: a write, two reads and a write more for each further linear. Gradients of z are written side by
side, with s: no kernel joins them, or scales them. Here

    forward     [z_1 | ... | z_n] = s x [A_1; ...; A_n]^T
    backward    dx = sum_k g_k W_k + s [dz_1 | ... | dz_n] [A_1; ...; A_n],   [dA_1; ...; dA_n] = s [dz_1 | ...]^T x
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshlora.layers.notes import note, noted
from meshlora.layers.products import TakeGradient
from meshlora.layers.rounded import scaled_product, stacked, wide_product
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


class JoinedGradient:
    """The gradient `[T, r_1 + ... + r_n]` of `x [A_1; ...; A_n]^T`, in which each linear writes its columns.

    widths: r of each. scale: s of all, with which they are written.
    """

    def __init__(self, widths: Sequence[int], scale: float) -> None:
        self.widths, self.scale = widths, scale
        self._columns: list[Tensor] = []
        self._whole: Tensor | None = None
        self._used: set[int] = set()
        self._backward = -1

    def take_dz(self, place: int, g: Tensor, b: Tensor) -> None:
        """Add `s g B`, of the linear at `place`."""
        columns, is_used = self._of(place, g)
        columns.addmm_(g, b, beta=int(is_used), alpha=self.scale)

    def add(self, place: int, dz: Tensor) -> None:
        """Add `s dz` there."""
        columns, is_used = self._of(place, dz)
        if is_used:
            columns.add_(dz, alpha=self.scale)
        else:
            torch.mul(dz, self.scale, out=columns)

    def take(self) -> tuple[Tensor | None, list[int]]:
        """The columns of the running backward, joined, and the places that have some; cleared by the call."""
        whole, used = self._whole, sorted(self._used)
        is_other = self._backward != running_backward()
        if whole is not None and len(used) < len(self.widths):
            whole = torch.cat([self._columns[place] for place in used], 1)
        self._clear()
        return (None, []) if is_other else (whole, used)

    def _of(self, place: int, like: Tensor) -> tuple[Tensor, bool]:
        """The columns of `place`, and whether something is in them."""
        if self._backward != running_backward():  # one that was aborted is ignored
            self._clear()
            self._backward = running_backward()
        if self._whole is None:
            self._whole = like.new_empty(len(like), sum(self.widths))
            self._columns = list(self._whole.split(list(self.widths), 1))
        is_used = place in self._used
        self._used.add(place)
        return self._columns[place], is_used

    def _clear(self) -> None:
        self._whole, self._columns, self._used = None, [], set()


class ShareFunction(Function):
    """forward: an empty tensor, as a node of the graph after x, and each s x A^T.

    backward: the gradient accumulated for x and the terms of these products; those of the factors whose z was used.
    joined: where the gradients of z come together, from linears that write them there and from the graph.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gradient: InputGradient, joined: JoinedGradient, *factors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.gradient, ctx.shape, ctx.joined, ctx.dtypes = gradient, x.shape, joined, [a.dtype for a in factors]
        ctx.set_materialize_grads(False)  # a z without a gradient in the graph: None, not zeros
        if not factors:
            # No view of x: that would keep x alive, and x its notes, for ever.
            return (x.new_empty(0),)
        every = stacked(factors, x.dtype)
        x2 = x.detach().view(-1, x.shape[-1])  # without the notes of x, as above
        ctx.save_for_backward(x2 if any(ctx.needs_input_grad[3:]) else None, every)
        return x.new_empty(0), *scaled_product(x2, every.T, joined.scale).split(list(joined.widths), 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        joined, dx = ctx.joined, ctx.gradient.take()
        das: list[Tensor | None] = [None] * len(grads[1:])
        for place, own in enumerate(grads[1:]):
            if own is not None:
                joined.add(place, own)
        dz, used = joined.take()
        if dz is not None:
            x, every = ctx.saved_tensors
            # One of them may have been called with another tensor, or be frozen: its rows take no part.
            if len(used) < len(das):
                parts = every.split(joined.widths)
                every = torch.cat([parts[place] for place in used])
            dx = dz @ every if dx is None else dx.addmm_(dz, every)
            if x is not None:
                found = wide_product(dz.mT, x, ctx.dtypes[used[0]]).split([joined.widths[place] for place in used])
                for place, da in zip(used, found, strict=True):
                    das[place] = da if ctx.needs_input_grad[3 + place] else None
        return None if dx is None else dx.view(ctx.shape), None, None, *das


class SharedInput(NamedTuple):
    """The note on a shared input.

    gradient: where linears accumulate its gradient. token: `[0]`, passed to each linear with the detached input: by it
    the input's gradient waits for all of them. zs: linear -> its s x A^T `[T, r]`, where it was computed here, and in
    `takes` what takes the gradient of that.
    backward: that in which it was made, as layers are computed again, -1: in none.
    """

    gradient: InputGradient
    token: Tensor
    zs: Mapping[nn.Module, Tensor]
    takes: Mapping[nn.Module, TakeGradient]
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
        together = JoinedGradient(list(map(len, factors)), scale)
        token, *zs = ShareFunction.apply(x, gradient, together, *factors)
        takes = {leaf: partial(together.take_dz, place) for place, leaf in enumerate(leaves)}
        own = SharedInput(gradient, token, dict(zip(leaves, zs, strict=True)), takes, running_backward())
        found = note(x, own)
    return found
