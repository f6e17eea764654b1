"""Early A: under sp, x A^T of a region's linears is computed before the gather of x, and gathered with it.

Owns: packing these low-rank activations with the input before its gather and unpacking them after it, with gradients;
the note on the gathered input in which linears find theirs. Does not own: the gather (`model.regions`), the use of the
activations (`wings.kernels.entrance`).

A linear that multiplies the gathered input by A saves all of it, `[T, H]`, on every rank, for dA alone. Here each rank
multiplies its own tokens before the gather, and saves only these, `[T/tp, H]`.

    forward     z_k = s_k D(x) A_k^T                  of own tokens
                gather of [x | z_1 | ... | z_n]       `[T, H + r_1 + ... + r_n]`
                y_k = x W_k^T + z_k B_k^T             of all tokens
    backward    dz_k = g_k B_k, dx = sum_k g_k W_k    terms of sums over tp, of all tokens
                reduce-scatter of [dx | dz_1 | ... | dz_n]
                dA_k = s_k dz_k^T D(x), dx += D(s_k dz_k A_k)      of own tokens

The number of collectives is unchanged, products with A run on 1/tp of the tokens, and dA is still a sum of terms over
tp: now one for each rank's tokens, no longer one for its output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshlora.layers.linear import ParallelLinear
from meshlora.layers.notes import note, noted
from meshlora.layers.rounded import scaled_product, stacked, wide_product
from meshlora.layers.tokens import Mask


@dataclass(frozen=True)
class Rider:
    """A linear whose z is gathered with x. a: `[r, H]`. scale: s. dropout: the mask of own tokens, or None."""

    leaf: nn.Module
    a: Tensor
    scale: float
    dropout: Mask | None


def rider(leaf: ParallelLinear, x: Tensor) -> Rider | None:
    """What is needed of a linear, or None. x: this rank's tokens of a region's input, `[..., in]`."""
    name = leaf.in_use
    if name is None or leaf.in_features != x.shape[-1]:
        return None
    return Rider(leaf, leaf.factor_a(name), leaf.scaling[name], leaf.mask(name, x))


class Ride(dict[nn.Module, Tensor]):
    """The note on a gathered input: linear -> its z `[T, r]`."""


def _together(riders: Sequence[Rider]) -> list[slice]:
    """Riders that have their products together: all, with one scale and no dropout; else each by itself."""
    if len({rider.scale for rider in riders}) == 1 and all(rider.dropout is None for rider in riders):
        return [slice(0, len(riders))]
    return [slice(place, place + 1) for place in range(len(riders))]


class Pack(Function):
    """x `[t, H]`, own tokens -> [x | z_1 | ... | z_n]. factors: A of each rider, passed separately for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, riders: Sequence[Rider], *factors: Tensor) -> Tensor:
        parts, stacks, ctx.groups = [x], [], _together(riders)
        for group in ctx.groups:
            first, a = riders[group][0], stacked(factors[group], x.dtype)
            seen = x if first.dropout is None else first.dropout.drop(x)
            parts.append(scaled_product(seen, a.T, first.scale))
            stacks.append(a)
        # x for dA alone: with frozen A nothing of it is kept.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2:]) else None, *stacks)
        ctx.width, ctx.ranks, ctx.dtypes = x.shape[1], list(map(len, factors)), [a.dtype for a in factors]
        ctx.how = [(rider.scale, rider.dropout) for rider in riders]
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *stacks = ctx.saved_tensors
        part, *dzs = grads[0].split([ctx.width, *map(len, stacks)], 1)
        dx = part.clone()  # `part` is a view of a gradient that others may hold
        das: list[Tensor | None] = []
        for group, a, dz in zip(ctx.groups, stacks, dzs, strict=True):
            scale, dropout = ctx.how[group][0]
            dz = dz * scale  # not in place, as above
            if dropout is None:
                dx.addmm_(dz, a)
            else:
                dx.add_(dropout.drop(dz @ a))
            needs = ctx.needs_input_grad[2:][group]
            if any(needs):  # for all then: autograd has no use for that of a frozen one
                seen = x if dropout is None else dropout.drop(x)
                das += wide_product(dz.T, seen, ctx.dtypes[group][0]).split(ctx.ranks[group])
            else:
                das += [None] * len(needs)
        return dx, None, *das


class _Unpack(Function):
    """[x | z_1 | ... | z_n] `[T, H + ...]`, of all tokens -> x, z_1, ..., z_n.

    Copies: a view would keep the whole gathered tensor alive as long as any of them.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # None says which linear was called with another tensor
        ctx.shape, ctx.dtype, ctx.device, ctx.widths = packed.shape, packed.dtype, packed.device, widths
        return tuple(part.contiguous() for part in packed.split(widths, -1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        def of(grad: Tensor | None, width: int) -> Tensor:
            # A linear that was called with a tensor other than the region's input returns no gradient.
            return torch.zeros(*ctx.shape[:-1], width, dtype=ctx.dtype, device=ctx.device) if grad is None else grad

        return torch.cat([of(grad, width) for grad, width in zip(grads, ctx.widths, strict=True)], -1), None


def with_riders(gather: Callable[[Tensor], Tensor], leaves: Sequence[ParallelLinear]) -> Callable[[Tensor], Tensor]:
    """`gather` of the input of a region, `[1, B*S/tp, H]` -> `[B, S, H]`, together with the results of early A.

    leaves: the linears that may read it. Without a gradient for x there is no early A: sending a gradient of z alone
    would be another kind of message.
    """

    def gathered(x: Tensor) -> Tensor:
        riding: list[Rider] = []
        if torch.is_grad_enabled() and x.requires_grad:
            riding = [found for leaf in leaves if (found := rider(leaf, x))]
        if not riding:
            return gather(x)
        return unpack(gather(pack(x, riding)), x.shape[-1], riding)

    return gathered


def pack(x: Tensor, riders: Sequence[Rider]) -> Tensor:
    """x `[..., H]`, own tokens -> `[..., H + r_1 + ...]`."""
    # The factors as arguments of their own: autograd looks into no list of riders.
    packed: Tensor = Pack.apply(x.reshape(-1, x.shape[-1]), riders, *(rider.a for rider in riders))
    return packed.view(*x.shape[:-1], -1)


def unpack(packed: Tensor, width: int, riders: Sequence[Rider]) -> Tensor:
    """The gathered result of `pack`, `[..., width + ...]` -> x `[..., width]`, with each z in a note on it."""
    x, *zs = _Unpack.apply(packed, [width, *(len(rider.a) for rider in riders)])
    note(x, Ride({rider.leaf: z for rider, z in zip(riders, zs, strict=True)}))
    return x


def rode_along(leaf: nn.Module, x: Tensor) -> Tensor | None:
    """z `[T, r]` of `leaf`, if it was gathered with x and x is unchanged."""
    ride = noted(x, Ride)
    z = None if ride is None else ride.get(leaf)
    return None if z is None else z.view(-1, z.shape[-1])
