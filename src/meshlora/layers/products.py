"""The products of a linear with LoRA: `y = x W^T + b + s (x A^T) B^T` with W frozen, of one adapter or of several.

Owns: forward and backward in one autograd function, each adapter on its own rows; what else may be known of x when it
enters (`Entered`). Does not own: which rows are which adapter's (`layers.tokens`), the module that holds the matrices
(`layers.linear`), who knows more of x than its values (`wings.kernels.entrance`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from meshlora.layers.frozen import FewBits, gradient_of_input
from meshlora.layers.rounded import rounded, scaled_product, wide_product
from meshlora.layers.tokens import Segment, are_alike
from meshlora_ground.transfer import to_device

# Up to this many tokens a product on CPUs is faster with tokens as columns: by a fifth at 32, equal at 64, slower
# beyond (MKL, float32, 1,024 x 1,408). bfloat16 has other kernels.
_FEW_TOKENS = 32


class Source(NamedTuple):
    """What x is computed of: `compute(*tensors)`, as in the forward. Saved in place of x."""

    tensors: Sequence[Tensor]
    compute: Callable[..., Tensor]


class SharedGradient(Protocol):
    """The gradient of one x `[T, in]`, to which several linears add in the same backward."""

    def so_far(self) -> Tensor | None:
        """The sum, to be changed in place; None: this linear is the first. `hold` must follow."""

    def hold(self, total: Tensor) -> None:
        """Keep the sum."""


# (g `[T, out]`, B `[out, r]`) -> takes `g B`, the gradient of a linear's z, to where that of its A is computed.
TakeGradient = Callable[[Tensor, Tensor], None]


class Entered(NamedTuple):
    """x as it enters a linear, and what else is known of it. Decides how products are computed, never what they are.

    x: `[..., in]`.
    z: `[T, r]`, `s D(x) A^T` of the one adapter in use, where it is there already: A has its gradient through z.
    take_dz: takes the gradient of z, which then has none in the graph; None: it goes through the graph.
    source: saved for the gradient of A, in place of x.
    gradient: where that of x is added up, which then is detached. token: `[0]`, before this linear and after x in the
        graph, by which the input's gradient waits for all that add to it.
    """

    x: Tensor
    z: Tensor | None = None
    source: Source | None = None
    gradient: SharedGradient | None = None
    token: Tensor | None = None
    take_dz: TakeGradient | None = None


class LoraLinearFunction(Function):
    """`y = x W^T + b`, and on the rows of each segment `+ z B^T`, `z = s D(x) A^T`, of its own s, D, A, B.

    Shapes: x `[T, in]`, W `[out, in]`; of a segment x `[t, in]`, A `[r, in]`, B `[out, r]`. One adapter is one segment
    of all rows. D zeroes elements and scales the others (dropout); it is its own adjoint.

    forward: y[t,o] = sum_i x[t,i] W[o,i] + b[o] + sum_r z[t,r] B[o,r]
    backward, with g = dL/dy:
        dz = s g B             `[t, r]`
        dA = dz^T D(x)         `[r, in]`
        dB = g^T z             `[out, r]`
        dx = D(dz A) + g W     `[T, in]`
    The small product comes first and the large one accumulates into it at almost no extra cost; the other order takes
    one more pass over y and dx.
    Segments that are alike (`layers.tokens.are_alike`) run as one batched product, not as a masked product of all rows
    with all factors: there an infinity in one adapter's rows would reach the others' gradients. The factors of a
    segment without rows get zeros: other ranks have its rows.
    W and b are frozen: no gradient is computed for them, and x, or its source, is saved for dA alone. A packed W is
    unpacked in each direction, once for all segments, and only the packed one is saved. The mask of D is recomputed in
    the backward.
    The factors may have higher precision than x (fp32 with bf16): products take rounded ones (`layers.rounded`), and
    the gradients are returned in the higher precision.

    x, token: of `entered`, by themselves as autograd looks at arguments. factors: A and B of each segment in turn.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token: Tensor | None,
        weight: Tensor | FewBits,
        bias: Tensor | None,
        segments: Sequence[Segment],
        entered: Entered,
        *factors: Tensor,
    ) -> Tensor:
        x2 = x.reshape(-1, x.shape[-1])
        ctx.dtypes = [factor.dtype for factor in factors]  # of their gradients, before rounding
        factors = tuple(rounded(factor, x.dtype) for factor in factors)
        groups = _groups(segments, factors)
        zs = [group.product(group.seen(x2), group.a.mT) for group in groups]
        y = _sum_of_products(x, weight, bias, list(zip(groups, zs, strict=True)))
        source = entered.source or Source((x2,), lambda x: x)
        inputs = source.tensors if any(ctx.needs_input_grad[6::2]) else ()  # of every second factor: the As
        save(ctx, weight, *factors, *zs, *inputs)
        ctx.segments, ctx.gradient, ctx.compute = segments, entered.gradient, source.compute
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = saved(ctx)
        number = 2 * len(ctx.segments)
        groups = _groups(ctx.segments, kept[:number])
        zs, inputs = kept[number : number + len(groups)], kept[number + len(groups) :]
        g = grads[0].reshape(-1, weight.shape[0])
        needs = ctx.needs_input_grad[6:]
        x = ctx.compute(*inputs).reshape(-1, weight.shape[1]) if inputs else None  # None: no A is trained
        dzs, found, place = [], [], 0
        for group, z in zip(groups, zs, strict=True):
            own = group.rows(g)
            dzs.append(group.product(own, group.b))
            stop = place + 2 * len(group.segments)
            das: Sequence[Tensor | None] = [None] * len(group.segments)
            dbs = das
            if x is not None and any(needs[place:stop:2]):
                das = group.each(wide_product(dzs[-1].mT, group.seen(x), ctx.dtypes[place]))
            if any(needs[place + 1 : stop : 2]):
                dbs = group.each(_gradient_of_b(own, z, ctx.dtypes[place + 1]))
            for da, db in zip(das, dbs, strict=True):  # in the order of the factors
                found += [da, db]
            place = stop
        dx = gradient_of_x(ctx, grads[0], weight, list(zip(groups, dzs, strict=True)))
        return dx, None, None, None, None, None, *found


class GivenZFunction(Function):
    """`y = x W^T + b + z B^T` of one adapter, whose z `[T, r]` is there already.

    backward, with g = dL/dy: dz = g B, dB = g^T z, dx = g W. Nothing of x is saved. Else as `LoraLinearFunction`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token: Tensor | None,
        weight: Tensor | FewBits,
        bias: Tensor | None,
        entered: Entered,
        z: Tensor,
        b: Tensor,
    ) -> Tensor:
        ctx.dtype, b = b.dtype, rounded(b, x.dtype)
        all_rows = _Group([Segment(0, len(z), 1.0)], [], [b])  # z has the scale already
        y = _sum_of_products(x, weight, bias, [(all_rows, z)])
        save(ctx, weight, z, b)
        ctx.gradient, ctx.take_dz = entered.gradient, entered.take_dz
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, z, b = saved(ctx)
        g = grads[0].reshape(-1, weight.shape[0])
        dz = None
        if ctx.take_dz is None:
            dz = g @ b
        elif ctx.needs_input_grad[5]:
            ctx.take_dz(g, b)
        db = _gradient_of_b(g, z, ctx.dtype) if ctx.needs_input_grad[6] else None
        return gradient_of_x(ctx, grads[0], weight), None, None, None, None, dz, db


def save(ctx: Any, weight: Tensor | FewBits, *tensors: Tensor) -> None:
    """Save for the backward; a packed W as it is, which no tensor can be."""
    ctx.packed = weight if isinstance(weight, FewBits) else None
    ctx.save_for_backward(None if ctx.packed is not None else weight, *tensors)


def saved(ctx: Any) -> tuple[Any, ...]:
    """What `save` was given."""
    weight, *tensors = ctx.saved_tensors
    if ctx.packed is not None:
        weight = ctx.packed
    return weight, *tensors


@dataclass(frozen=True)
class _Group:
    """Segments computed as one product: a single one, with tensors `[t, ...]`, or K that are alike, `[K, t, ...]`.

    Attributes:
        each_a, each_b: the factors of each segment.
    """

    segments: Sequence[Segment]
    each_a: Sequence[Tensor]
    each_b: Sequence[Tensor]

    @property
    def a(self) -> Tensor:
        """`[r, in]` or `[K, r, in]`, a new tensor on each call."""
        return self.each_a[0] if len(self.each_a) == 1 else torch.stack(list(self.each_a))

    @property
    def b(self) -> Tensor:
        """`[out, r]` or `[K, out, r]`, as `a`."""
        return self.each_b[0] if len(self.each_b) == 1 else torch.stack(list(self.each_b))

    def rows(self, x: Tensor) -> Tensor:
        """Its rows of x `[T, ...]`, a view."""
        own = x[self.segments[0].start : self.segments[-1].stop]
        # Alike ones are contiguous, and equally long.
        return own if len(self.segments) == 1 else own.unflatten(0, (len(self.segments), -1))

    def seen(self, x: Tensor) -> Tensor:
        """Its rows of x after dropout."""
        mask = self.segments[0].dropout
        return self.rows(x) if mask is None else mask.drop(self.rows(x))

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """`s left right`, with the s of each segment."""
        if len(self.segments) == 1:
            return scaled_product(left, right, self.segments[0].scale)
        scales = torch.tensor([segment.scale for segment in self.segments], dtype=left.dtype, device="cpu")
        return (left @ right).mul_(to_device(scales, left.device).view(-1, 1, 1))

    def each(self, gradient: Tensor) -> Sequence[Tensor]:
        """The gradient of each segment's factor."""
        return [gradient] if len(self.segments) == 1 else gradient.unbind()


def _groups(segments: Sequence[Segment], factors: Sequence[Tensor]) -> list[_Group]:
    """factors: A and B of each segment in turn."""
    if len(segments) > 1 and are_alike(segments, factors):
        return [_Group(segments, factors[::2], factors[1::2])]
    pairs = zip(segments, factors[::2], factors[1::2], strict=True)
    return [_Group((segment,), (a,), (b,)) for segment, a, b in pairs]


def _gradient_of_b(g: Tensor, z: Tensor, dtype: torch.dtype) -> Tensor:
    """`g^T z` `[..., out, r]`."""
    if g.is_cpu:  # the transpose: twice as fast there
        return (z.mT @ g).mT.to(dtype, memory_format=torch.contiguous_format)
    return wide_product(g.mT, z, dtype)


# A group, and its z or dz, `[..., t, r]`.
_Term = tuple[_Group, Tensor]


def gradient_of_x(ctx: Any, grad: Tensor, weight: Tensor | FewBits, terms: Sequence[_Term] = ()) -> Tensor | None:
    """`D(dz A)` of all (group, dz), and `g W`; None where it is added to that of other linears."""
    shared: SharedGradient | None = ctx.gradient
    if shared is None and not ctx.needs_input_grad[0]:
        return None
    g = grad.reshape(-1, weight.shape[0])
    total = None if shared is None else shared.so_far()  # the sum of the linears that came before in this backward
    if isinstance(weight, FewBits) and weight.has_backward:  # which add to nothing: theirs is the first product
        total = _with_terms(gradient_of_input(g, weight, total), terms, g, weight.shape[1])
    else:
        if terms:
            total = _with_terms(total, terms, g, weight.shape[1])
        total = gradient_of_input(g, weight, total)
    if shared is None:
        return total.view(*grad.shape[:-1], weight.shape[1])
    shared.hold(total)
    return None


def _with_terms(total: Tensor | None, terms: Sequence[_Term], g: Tensor, width: int) -> Tensor:
    """`total` `[T, width]` with D(dz A) added on the rows of each group, in place; None: zeros."""
    is_first = total is None
    if total is None:
        # What every row gets a term of need not be cleared before.
        new = g.new_empty if _cover(terms, len(g)) else g.new_zeros
        total = new(len(g), width)
    for group, dz in terms:
        rows, a, mask = group.rows(total), group.a, group.segments[0].dropout
        if mask is not None:
            term = mask.drop(dz @ a)
            if is_first:
                rows.copy_(term)
            else:
                rows.add_(term)
        elif is_first:
            torch.matmul(dz, a, out=rows)
        elif a.ndim == 2:
            rows.addmm_(dz, a)
        else:
            rows.baddbmm_(dz, a)
    return total


def _cover(terms: Sequence[_Term], num_rows: int) -> bool:
    """Whether every row is in a group."""
    number = 0
    for group, _ in terms:
        number += group.segments[-1].stop - group.segments[0].start  # those of one group are contiguous
    return number == num_rows


def _sum_of_products(x: Tensor, weight: Tensor | FewBits, bias: Tensor | None, terms: Sequence[_Term]) -> Tensor:
    """`x W^T + bias`, and `z B^T` on the rows of each (group, z); `[..., out]`, x `[..., in]`."""
    x2 = x.reshape(-1, x.shape[-1])
    y = x.new_empty(*x.shape[:-1], weight.shape[0])  # no view: some models change it in place
    rows = y.view(-1, weight.shape[0])
    if isinstance(weight, FewBits) and weight.has_forward:
        weight.write_product(rows, x2, bias)
        for group, z in terms:
            own, bt = group.rows(rows), group.b.mT
            if z.ndim == 2:
                own.addmm_(z, bt)
            else:
                own.baddbmm_(z, bt)
        return y
    if isinstance(weight, FewBits):
        x2, weight = weight.entering(x2), weight.whole()
    covered = _cover(terms, len(x2))
    if not covered:
        if bias is None:
            rows.zero_()
        else:
            rows.copy_(bias)
    is_small = len(x2) <= _FEW_TOKENS and x.is_cpu and x.dtype in (torch.float32, torch.float64)
    if is_small and bias is None and covered and len(terms) == 1 and terms[0][1].ndim == 2:
        ((group, z),) = terms
        rows.copy_((group.b @ z.T).addmm_(weight, x2.T).T)
        return y
    # The bias enters with the small product, so that no pass over y is its own.
    for group, z in terms:
        own, bt = group.rows(rows), group.b.mT
        if bias is None:
            torch.matmul(z, bt, out=own)
        elif z.ndim == 2:
            torch.addmm(bias, z, bt, out=own)
        else:
            torch.baddbmm(bias, z, bt, out=own)
    rows.addmm_(x2, weight.T)
    return y
