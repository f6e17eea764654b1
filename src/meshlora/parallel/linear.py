"""The linear layer with LoRA on a mesh: column-parallel, row-parallel or whole.

Owns: forward and backward of `y = x W^T + b + s (x A^T) B^T` with W frozen, in one autograd function (in another one
where x A^T comes with x), and the module that holds the local parts of W, A and B. Does not own: where regions begin
(`parallel.region`), how factors are drawn (`adapter.initialization`).

Column-parallel layers communicate nothing. A row-parallel layer adds its base and LoRA terms locally and reduces the
sum once; the bias is added after that, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshlora.parallel.collectives import (
    all_reduce_sum,
    gather_each_to_one,
    reduce_each_to_one,
    reduce_scatter_each_to_each,
)
from meshlora.parallel.dropout import DropoutTokens, Mask, input_features
from meshlora.parallel.gated import Product, product_behind
from meshlora.parallel.groups import Axis
from meshlora.parallel.leaf import AdaptedLeaf
from meshlora.parallel.many import ManyTokens, linear_with_many
from meshlora.parallel.quantized import Packed, frozen_linear, pack, unpacked
from meshlora.parallel.recipe import LogitsRecipe
from meshlora.parallel.ride import Rider, rode_along
from meshlora.parallel.shared_input import InputGradient, share
from meshlora.plan.layout import Split
from meshlora.plan.rules import LinearRule

# Up to so many tokens a product on CPUs is faster with the tokens as its columns: by a fifth at 32, equal at 64, slower
# beyond (MKL, float32, 1,024 x 1,408). bfloat16 has other kernels.
_FEW_TOKENS = 32


class LoraLinearFunction(Function):
    """`y = x W^T + b + z B^T`, `z = s x A^T`; shapes x `[T, in]`, W `[out, in]`, A `[r, in]`, B `[out, r]`.

    forward: y[t,o] = sum_i x[t,i] W[o,i] + b[o] + sum_r z[t,r] B[o,r]
    backward, with g = dL/dy:
        dz = s g B          `[T, r]`
        dA = dz^T x         `[r, in]`
        dB = g^T z          `[out, r]`
        dx = dz A + g W     `[T, in]`
    The small product comes first and the large one is added to it, which costs the large one next to nothing; the
    other way round is one more pass over y and dx.
    With dropout, z = s D(x) A^T, where D zeroes elements and scales the others: it is its own adjoint, so
    dA = dz^T D(x) and dx = D(dz A) + g W. Its mask is computed once more in the backward.
    W and b are frozen: no gradient is computed for them, and x is saved for dA alone; of a product of two tensors that
    are kept anyway (`parallel.gated`) these are saved in its place. A packed W is unpacked in either direction, and
    what is kept of it is the packed one. Where x is shared with other linears, all of them add to one dx and return
    none (`parallel.shared_input`): they are called with x detached, and the token of what is shared.
    The factors may be of higher precision than x (fp32 beside bf16): they are rounded on use, their gradients are not
    kept in the lower precision.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | Packed,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        dropout: Mask | None = None,
        product: Product | None = None,
        gradient: InputGradient | None = None,
        token: Tensor | None = None,
    ) -> Tensor:
        x2 = x.reshape(-1, x.shape[-1])
        packed = weight if isinstance(weight, Packed) else None
        plain = unpacked(weight)
        z = ((x2 if dropout is None else dropout.drop(x2)) @ a.to(x.dtype).T).mul_(scale)
        y = _sum_of_products(x, plain, bias, z, b.to(x.dtype))
        inputs = (x2,) if product is None else (product.gate, product.up.detach())
        ctx.save_for_backward(None if packed else plain, a, b, z, *inputs)
        ctx.scale, ctx.dropout, ctx.packed, ctx.gradient = scale, dropout, packed, gradient
        ctx.activation = product.activation if product is not None else None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, a, b, z, *inputs = ctx.saved_tensors
        weight = weight if ctx.packed is None else ctx.packed.whole()
        dropout, gradient = ctx.dropout, ctx.gradient
        g = grads[0].reshape(-1, weight.shape[0])
        dz = (g @ b.to(g.dtype)).mul_(ctx.scale)
        dx = da = db = None
        if ctx.needs_input_grad[3]:
            x = _input(ctx, inputs)
            da = (dz.T @ (x if dropout is None else dropout.drop(x))).to(a.dtype)
        if ctx.needs_input_grad[4]:
            db = (z.T @ g).T.to(b.dtype, memory_format=torch.contiguous_format)  # twice as fast as g.T @ z
        if ctx.needs_input_grad[0] or gradient is not None:
            if dropout is not None:
                term = dropout.drop(dz @ a.to(g.dtype))
                dx = term if gradient is None else gradient.add(term)
            else:
                dx = dz @ a.to(g.dtype) if gradient is None else gradient.add_product(dz, a.to(g.dtype))
            dx.addmm_(g, weight)
            dx = dx.view(*grads[0].shape[:-1], weight.shape[1]) if gradient is None else None
        return dx, None, None, da, db, *[None] * 5


class RiddenLinearFunction(Function):
    """`LoraLinearFunction` of a z that came with x (`parallel.ride`): `y = x W^T + b + z B^T`.

    backward, with g = dL/dy: dz = g B, dB = g^T z, dx = g W. Nothing of x is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | Packed,
        bias: Tensor | None,
        b: Tensor,
        z: Tensor,
        gradient: InputGradient | None = None,
        token: Tensor | None = None,
    ) -> Tensor:
        packed = weight if isinstance(weight, Packed) else None
        plain = unpacked(weight)
        ctx.save_for_backward(None if packed else plain, b, z)
        ctx.packed, ctx.gradient = packed, gradient
        return _sum_of_products(x, plain, bias, z, b.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, b, z = ctx.saved_tensors
        weight = weight if ctx.packed is None else ctx.packed.whole()
        g = grads[0].reshape(-1, weight.shape[0])
        dx = db = None
        if ctx.needs_input_grad[3]:
            db = (z.T @ g).T.to(b.dtype, memory_format=torch.contiguous_format)
        if ctx.gradient is not None:
            ctx.gradient.add_product(g, weight)
        elif ctx.needs_input_grad[0]:
            dx = (g @ weight).view(*grads[0].shape[:-1], weight.shape[1])
        return dx, None, None, db, g @ b.to(g.dtype), None, None


def _sum_of_products(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, b: Tensor) -> Tensor:
    """`x W^T + bias + z B^T`, `[..., out]`; x `[..., in]`, z `[T, r]`."""
    x2 = x.reshape(-1, x.shape[-1])
    y = x.new_empty(*x.shape[:-1], weight.shape[0])  # no view: some models change it in place
    rows = y.view(-1, weight.shape[0])
    if len(x2) <= _FEW_TOKENS and x.is_cpu and x.dtype in (torch.float32, torch.float64) and bias is None:
        rows.copy_((b @ z.T).addmm_(weight, x2.T).T)
    else:
        small = torch.mm(z, b.T, out=rows) if bias is None else torch.addmm(bias, z, b.T, out=rows)
        small.addmm_(x2, weight.T)
    return y


def _input(ctx: Any, saved: list[Tensor]) -> Tensor:
    """x `[T, in]` of the forward, from what was saved in its place."""
    if ctx.activation is None:
        return saved[0]
    gate, up = saved
    # A product's own gradient follows, and needs the activation too.
    return (ctx.activation.of(gate, keep=True) * up).reshape(-1, up.shape[-1])


class ParallelLinear(AdaptedLeaf):
    """A frozen linear of the base model with its adapters, as this rank holds it.

    Attributes, besides those of `AdaptedLeaf`:
        rule: the whole matrix and how it is split.
        weight: local part of W, `[out_local, in]` (column), `[out, in_local]` (row) or `[out, in]` (whole).
        bias: `[out_local]` (column) or `[out]` (row, whole), or None.
        lora_magnitude_vector: adapter name -> local magnitudes `[out_local]` of DoRA.
        dropout: adapter name -> share of the input's elements that its A does not see in training; 0 is left out.
        quantized: how the weight is packed (`pack_weight`), None: not at all. weight and weight_absmax are then those
            of a `Packed`.
        tokens: which tokens the running forward has; None where no adapter has dropout.
        many: whose tokens they are, where several adapters are trained at once.
        scatters_tokens: under sp, whether the output leaves as this rank's slice of the tokens.
        has_neighbours: whether other linears are called with the same input.
    """

    has_neighbours = False

    def __init__(
        self, rule: LinearRule, tp: Axis, *, scatters_tokens: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(*rule.local_features(tp.size))
        self.rule, self.tp, self.scatters_tokens = rule, tp, scatters_tokens
        empty = torch.empty(self.out_features, self.in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.register_parameter("bias", None)
        if rule.has_bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype, device=device), requires_grad=False)
        self.lora_magnitude_vector = nn.ParameterDict()
        self.dropout: dict[str, float] = {}
        self.tokens: DropoutTokens | None = None
        self.many: ManyTokens | None = None
        self.quantized: str | None = None
        self.dtype = dtype

    def pack_weight(self, weight: Tensor, kind: str) -> None:
        """Hold `weight` `[out_local, in_local]` in few bits from now on."""
        packed = pack(weight, kind)
        self.weight = nn.Parameter(packed.codes, requires_grad=False)
        self.weight_absmax = nn.Parameter(packed.absmax, requires_grad=False)
        self.quantized, self.dtype = kind, weight.dtype

    @property
    def frozen_weight(self) -> Tensor | Packed:
        """W as products take it."""
        if self.quantized is None or self.weight.dtype != torch.uint8:
            return self.weight
        return Packed(self.weight, self.weight_absmax, self.quantized, self.dtype)

    def add_adapter(self, name: str, factors: Mapping[str, Tensor], *, scaling: float) -> None:
        """As `AdaptedLeaf`; with DoRA also `magnitude` `[out_local]`, in a call of its own or not."""
        if "magnitude" in factors:
            self.lora_magnitude_vector[name] = nn.Parameter(factors["magnitude"], requires_grad=False)
        super().add_adapter(name, {p: v for p, v in factors.items() if p != "magnitude"}, scaling=scaling)

    def set_dropout(self, name: str, p: float, tokens: DropoutTokens) -> None:
        """Let adapter `name` drop the share `p` of its input's elements while the module trains."""
        if p > 0:
            self.dropout[name], self.tokens = p, tokens

    def trained(self, adapter: str) -> dict[str, nn.Parameter]:
        """What of `adapter` sits here, under the names of `add_adapter`."""
        found = super().trained(adapter)
        if found and adapter in self.lora_magnitude_vector:
            found["magnitude"] = self.lora_magnitude_vector[adapter]
        return found

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., in_local]` -> y `[..., out_local]`; a row layer returns the sum over tp."""
        name = self.in_use
        is_row = self.rule.split is Split.ROW
        has_magnitude = name is not None and name in self.lora_magnitude_vector
        # What comes after the sum over tp, and what needs a gradient, is added by itself.
        adds_bias = self.bias is not None and (is_row or has_magnitude or self.bias.requires_grad)
        bias = None if adds_bias else self.bias
        if self.many is not None and self.many.is_on:
            y = linear_with_many(self, x, bias)
        elif name is None:
            y = frozen_linear(x, self.frozen_weight, bias)
        else:
            z = rode_along(self, x)
            function: type[Function]
            arguments: tuple[Any, ...]
            if z is not None:
                function, arguments = RiddenLinearFunction, (self.factor_b(name), z)
            else:
                function = LoraLinearFunction
                arguments = (*self.factors(name), self.scaling[name], self._mask(name, x), product_behind(x))
            shared = share(x) if self.has_neighbours else None
            of_neighbours = () if shared is None else (shared.gradient, shared.token)
            own = x if shared is None else x.detach()
            y = function.apply(own, self.frozen_weight, bias, *arguments, *of_neighbours)
        if is_row:
            y = self._leave_region(y)
        if name is not None and has_magnitude:
            magnitude = self.lora_magnitude_vector[name]
            y = y * (magnitude / self.weight_norm(name).to(magnitude.dtype)).to(y.dtype)
        return self._add_bias(y) if adds_bias else y

    def rider(self, x: Tensor) -> Rider | None:
        """What of this linear can ride with a region's input, of which this rank's tokens are x `[..., in]`."""
        name = self.in_use
        if name is None or self.in_features != x.shape[-1] or (self.many is not None and self.many.is_on):
            return None
        return Rider(self, self.factor_a(name), self.scaling[name], self._mask(name, x))

    def _mask(self, adapter: str, x: Tensor) -> Mask | None:
        if not self.training or adapter not in self.dropout:
            return None
        assert self.tokens is not None
        features = input_features(self.rule, self.tp).to(x.device)
        # Not the module's own name: what it returns may have a dropout too.
        name = f"{self.rule.name}.lora_dropout"
        return self.tokens.mask(name, self.dropout[adapter], x.numel() // x.shape[-1], features)

    def _piece_rows(self, piece: str) -> Tensor:
        assert self.rule.fused is not None, self.rule
        is_split = self.rule.split is Split.COLUMN
        return self.rule.fused.piece_rows(
            piece, rank=self.tp.rank if is_split else 0, size=self.tp.size if is_split else 1
        )

    def _leave_region(self, y: Tensor) -> Tensor:
        """y `[B, S, out]` or flat, one term of a sum -> the sum; under sp that of our tokens, `[1, B*S/tp, out]`."""
        if self.scatters_tokens:
            own = reduce_scatter_each_to_each(y.reshape(-1, y.shape[-1]), self.tp)
            return own if y.ndim == 2 else torch.unsqueeze_copy(own, 0)  # no view: some models add to it in place
        return reduce_each_to_one(y, self.tp)

    def _add_bias(self, y: Tensor) -> Tensor:
        assert self.bias is not None
        return y + self.bias

    @torch.no_grad()
    def weight_norm(self, adapter: str) -> Tensor:
        """`||W + s B A||` of each row, `[out_local]`: DoRA's, a constant to the gradient (section 4.3 of the paper).

        |w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b^T: no matrix of the size of W is made. Of a row-parallel
        linear each rank has the terms of its own input features: one small sum over tp.
        """
        a, b = (factor.float() for factor in self.factors(adapter))
        weight = unpacked(self.frozen_weight).float()
        scale = self.scaling[adapter]
        squares = weight.square().sum(1)
        squares += 2 * scale * (b * (weight @ a.T)).sum(1) + scale**2 * (b @ (a @ a.T) * b).sum(1)
        if self.rule.split is Split.ROW:
            squares = all_reduce_sum(squares, self.tp)
        return squares.clamp(min=0).sqrt()

    def extra_repr(self) -> str:
        return f"{self.rule.split}, {self.in_features} -> {self.out_features}, adapters={list(self.scaling)}"


class ParallelHead(ParallelLinear):
    """The output head, whose logits are split over the vocabulary.

    Called, it returns whole logits: gathered over tp. While `is_lazy` it returns a `LogitsRecipe` instead, from which
    the loss computes what it needs, a few tokens at a time.
    """

    is_lazy = False

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., in]` -> logits `[..., vocab]`."""
        if self.is_lazy:
            return LogitsRecipe(x, vocab=self.rule.out_features)
        return self._whole(self.local_logits(x))

    def local_logits(self, x: Tensor) -> Tensor:
        """x `[..., in]` -> logits `[..., vocab/tp]` of this rank's rows, padding included."""
        return super().forward(x)

    def _whole(self, y: Tensor) -> Tensor:
        if self.rule.split is Split.WHOLE:
            return y
        parts = gather_each_to_one(y.movedim(-1, 0).contiguous(), self.tp)
        return parts[: self.rule.out_features].movedim(0, -1)
