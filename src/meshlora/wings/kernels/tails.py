"""Low-rank terms of a gated MLP, computed where their results are multiplied: `model.kernels: fused`.

Owns: what the two operators compute, by definition on CPUs and by kernels on GPUs; the gated MLP that calls them, and
when it does. Does not own: the Triton kernels (`wings.kernels.tail_kernels`), frozen products (`layers.frozen`), the
other kernels (`wings.kernels.liger`).

After a frozen product a low-rank one reads and writes all of its result again, and the gate reads that. Here gate and
up leave their frozen products without the low-rank term, x `[T, F]` and u `[T, F]`, and one operator each way does the
rest: forward

    g = x + z_g B_g^T,  u' = u + z_u B_u^T,  p = silu(g) u',  z = s p A^T          A: of the linear after it

and backward, from the gradients d of p, without the term of A, and dz of z:

    dp = d + s dz A,  dg = dp u' silu'(g),  du = dp silu(g)
    dz_g = dg B_g,  dz_u = du B_u,  dB_g = dg^T z_g,  dB_u = du^T z_u,  dA = s dz^T p

g, u', dp and sums are float32 (float64 of float64); p, z, dg and du are rounded once, and what follows takes them
rounded. No cut of a mesh changes a term: F is split as the products before and after it are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import increment_version

from meshlora.layers.frozen import FewBits, write_product
from meshlora.layers.linear import ParallelLinear
from meshlora.layers.notes import note
from meshlora.layers.products import Entered, gradient_of_x, save, saved
from meshlora.layers.rounded import rounded
from meshlora.wings.kernels.early_a import Ride


class Tails(NamedTuple):
    """The two operators, of all rows at once: forward and back as `gate_tail` and `gate_tail_back` below."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    back: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


MOST_RANK = 32  # of kernels, which hold rows of each z in registers
# Of the backward's kernel: the features of a program in bytes, and the parts of the tokens that have one each.
ROW_BYTES, PARTS = 256, 2


def gated_mlp(mlp: Any, x: Tensor, tails: Tails) -> Any | None:
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`, x `[..., H]`; None where a linear has more than a matrix and one
    adapter, or its z is not there before its product."""
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    names = [plain_adapter(leaf) for leaf in (gate, up, down)]
    if None in names or not torch.is_grad_enabled() or down.dropout.get(names[2]):
        return None
    entered = [leaf.enter(leaf, x) for leaf in (gate, up)]
    zs = [own.z for own in entered]
    a = down.factor_a(names[2])
    if zs[0] is None or zs[1] is None or max(zs[0].shape[1], zs[1].shape[1], len(a)) > MOST_RANK:
        return None
    products = []
    for leaf, own in zip((gate, up), entered, strict=True):
        products.append(_Product.apply(own.x, own.token, leaf.frozen_weight, leaf.bias, own))
    factors = gate.factor_b(names[0]), up.factor_b(names[1]), a
    product, z = GateFunction.apply(*products, *zs, *factors, down.scaling[names[2]], tails)
    note(product, Ride({down: z}))
    return down(product)


def plain_adapter(leaf: nn.Module) -> str | None:
    """The one adapter of a linear that is nothing but a frozen product and a low-rank one; else None."""
    if type(leaf) is not ParallelLinear or (leaf.bias is not None and leaf.bias.requires_grad):
        return None
    name = leaf.in_use
    return None if name is None or name in leaf.variants else name


class _Product(Function):
    """`y = x W^T + b`, frozen, without the low-rank term, whose gradients are `GateFunction`'s; dx = g W."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token: Tensor | None, weight: Tensor | FewBits, bias: Tensor | None, entered: Entered
    ) -> Tensor:
        save(ctx, weight)
        ctx.gradient = entered.gradient
        return frozen_product(_rows(x), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = saved(ctx)
        return gradient_of_x(ctx, grads[0], weight), None, None, None, None


def frozen_product(x: Tensor, weight: Tensor | FewBits, bias: Tensor | None) -> Tensor:
    """`x W^T + b` `[T, out]`, x `[T, in]`."""
    y = x.new_empty(len(x), weight.shape[0])
    write_product(y, x, weight, bias)
    return y


class GateFunction(Function):
    """(x, u, z_g, z_u, B_g, B_u, A) -> (p, z), all `[..., F]` or `[T, r]`: see the module. Writes dg and du over x and
    u, which nothing else has."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        z_gate: Tensor,
        z_up: Tensor,
        b_gate: Tensor,
        b_up: Tensor,
        a: Tensor,
        scale: float,
        tails: Tails,
    ) -> tuple[Tensor, Tensor]:
        ctx.dtypes = b_gate.dtype, b_up.dtype, a.dtype
        factors = [rounded(factor, gate.dtype) for factor in (b_gate, b_up, a)]
        ctx.save_for_backward(gate, up, z_gate, z_up, *factors)
        ctx.scale, ctx.tails = scale, tails
        product, z = tails.forward(_rows(gate), _rows(up), z_gate, z_up, *factors, scale)
        return product.view(gate.shape), z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, z_gate, z_up, b_gate, b_up, a = ctx.saved_tensors
        product, dz = grads
        inner = _rows(gate.detach()), _rows(up.detach())
        given = z_gate, z_up, b_gate, b_up, a, dz.contiguous(), ctx.scale
        d_gate, d_up, of_z, of_factors = ctx.tails.back(_rows(product).contiguous(), *inner, *given)
        increment_version([gate, up])
        ranks = [z_gate.shape[1], z_up.shape[1]]
        dz_gate, dz_up = of_z.sum(0).to(gate.dtype).split(ranks, 1)
        db_gate, db_up, da = of_factors.sum(0).split([*ranks, len(a)])
        of_gate, of_up, of_a = ctx.dtypes
        found = dz_gate, dz_up, db_gate.T.to(of_gate), db_up.T.to(of_up), da.to(of_a)
        return d_gate.view(gate.shape), d_up.view(up.shape), *found, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# --- operators --------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("meshlora", "FRAGMENT")
_FACTORS = "Tensor z_gate, Tensor z_up, Tensor b_gate, Tensor b_up, Tensor a"
# gate, up `[T, F]`; z `[T, r]`; B `[F, r]`; A `[r, F]` -> p `[T, F]`, z `[T, r]`.
_LIBRARY.define(f"gate_tail(Tensor gate, Tensor up, {_FACTORS}, float scale) -> (Tensor, Tensor)")
# dp, and dz of z -> dg and du, over gate and up; terms of [dz_g | dz_u], `[n, T, r_g + r_u]`, and of
# [dB_g^T; dB_u^T; dA], `[m, r_g + r_u + r, F]`, both float32, to be summed over the first dim.
_BACK = f"Tensor grad, Tensor(a!) gate, Tensor(b!) up, {_FACTORS}, Tensor dz, float scale"
_LIBRARY.define(f"gate_tail_back({_BACK}) -> (Tensor(a!), Tensor(b!), Tensor, Tensor)")


class _Wide(NamedTuple):
    """gate and up with their low-rank terms, before they are rounded, and factors as wide. dtype: of the sums."""

    gate: Tensor
    up: Tensor
    factors: list[Tensor]
    dtype: torch.dtype

    @classmethod
    def of(cls, gate: Tensor, up: Tensor, *factors: Tensor) -> _Wide:
        dtype = torch.promote_types(gate.dtype, torch.float32)
        wide = [factor.to(dtype) for factor in factors]
        z_gate, z_up, b_gate, b_up, _ = wide
        return cls(gate.to(dtype) + z_gate @ b_gate.T, up.to(dtype) + z_up @ b_up.T, wide, dtype)


def _by_definition(gate: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *factors, scale = rest
    wide = _Wide.of(gate, up, *factors)
    product = (F.silu(wide.gate) * wide.up).to(gate.dtype)
    z = scale * (product.to(wide.dtype) @ wide.factors[-1].T)
    return product, z.to(gate.dtype)


def _back_by_definition(grad: Tensor, gate: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *factors, dz, scale = rest
    wide = _Wide.of(gate, up, *factors)
    z_gate, z_up, b_gate, b_up, a = wide.factors
    dz = dz.to(wide.dtype)
    dp = grad.to(wide.dtype) + scale * (dz @ a)
    sigmoid = wide.gate.sigmoid()
    silu = wide.gate * sigmoid
    product = (silu * wide.up).to(gate.dtype).to(wide.dtype)
    gate.copy_(dp * wide.up * (sigmoid + silu * (1 - sigmoid)))
    up.copy_(dp * silu)
    dg, du = gate.to(wide.dtype), up.to(wide.dtype)
    of_z = torch.cat([dg @ b_gate, du @ b_up], 1)
    of_factors = torch.cat([z_gate.T @ dg, z_up.T @ du, scale * (dz.T @ product)])
    return gate, up, of_z[None], of_factors[None]


def columns_of(x: Tensor) -> int:
    """Features of a program: products in float32, which are no tensor core's, hold all of a row of them at once."""
    return ROW_BYTES // x.element_size()


def _on_gpu(*given: Any) -> tuple[Tensor, Tensor]:
    from meshlora.wings.kernels import tail_kernels  # which needs Triton

    return tail_kernels.gate_tail(*given, columns=columns_of(given[0]))


def _back_on_gpu(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from meshlora.wings.kernels import tail_kernels

    gate, up, of_z, of_factors = _back_shapes(*given)
    tail_kernels.gate_tail_back(*given, of_z, of_factors, columns=columns_of(gate))
    return gate, up, of_z, of_factors


def _shapes(gate: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), gate.new_empty(len(gate), len(rest[4]))


def _back_shapes(grad: Tensor, gate: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, width = gate.shape
    ranks = rest[0].shape[1] + rest[1].shape[1]
    of_z = gate.new_empty(-(-width // columns_of(gate)), tokens, ranks, dtype=torch.float32)
    return gate, up, of_z, gate.new_empty(PARTS, ranks + len(rest[4]), width, dtype=torch.float32)


_LIBRARY.impl("gate_tail", _by_definition, "CPU")
_LIBRARY.impl("gate_tail_back", _back_by_definition, "CPU")
_LIBRARY.impl("gate_tail", _on_gpu, "CUDA")
_LIBRARY.impl("gate_tail_back", _back_on_gpu, "CUDA")
_LIBRARY.impl("gate_tail", _shapes, "Meta")
_LIBRARY.impl("gate_tail_back", _back_shapes, "Meta")


def tails() -> Tails:
    """The two operators."""
    return Tails(torch.ops.meshlora.gate_tail, torch.ops.meshlora.gate_tail_back)
