"""Several adapters in one forward: the frozen base once on all tokens, each adapter on its own.

Owns: `ManyTokens`, what a forward is told of whose tokens it has; forward and backward of a linear with several
adapters, in one autograd function. Does not own: a linear with one adapter (`parallel.linear`), which rows of a batch
are whose (`train.many`), the bits of dropout's masks (`meshlora.dropout`).

The tokens of one adapter are neighbours: a *share* is a range of the flat tokens `[B*S]` of the forward. A module sees
all of them or, under sp between regions, its rank's slice, in which a share may be cut or have no token at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from meshlora.dropout import mask_key
from meshlora.errors import UnsupportedError
from meshlora.parallel.dropout import Mask, input_features
from meshlora.parallel.groups import Axis
from meshlora.parallel.quantized import Packed, frozen_linear, unpacked
from meshlora.transfer import to_device

if TYPE_CHECKING:
    from meshlora.parallel.linear import ParallelLinear


@dataclass(frozen=True)
class Share:
    """The tokens of one adapter in the running forward.

    Attributes:
        adapter: its name. tokens: int64 `[T]`, their numbers in its own optimizer step.
        seed, step: of its own run, for the masks of dropout.
    """

    adapter: str
    tokens: Tensor
    seed: int = 0
    step: int = 0


@dataclass(frozen=True)
class Segment:
    """What one linear does with the rows `start:stop` of its input: which scale, which mask."""

    start: int
    stop: int
    scale: float
    dropout: Mask | None = None

    def of(self, x: Tensor) -> Tensor:
        """The rows of `x` `[T, ...]`, a view."""
        return x[self.start : self.stop]

    def dropped(self, x: Tensor) -> Tensor:
        """The rows of `x` as A sees them."""
        rows = self.of(x)
        return rows if self.dropout is None else self.dropout.drop(rows)


class ManyTokens:
    """Whose tokens the running forward has; one for each model, shared by its layers."""

    def __init__(self, tp: Axis, *, sp: bool) -> None:
        self.tp, self.sp = tp, sp
        self._shares: tuple[Share, ...] | None = None

    @property
    def is_on(self) -> bool:
        """Whether a forward of several adapters runs."""
        return self._shares is not None

    @contextlib.contextmanager
    def at(self, shares: Sequence[Share]) -> Iterator[None]:
        """Inside the block forwards and backwards are of these shares, in this order along the flat tokens."""
        before = self._shares
        self._shares = tuple(shares)
        try:
            yield
        finally:
            self._shares = before

    def ranges(self, module: str, num_rows: int) -> list[tuple[Share, int, int, int]]:
        """(share, its first and last row among `num_rows` rows of `module`'s input, where in the share these begin).

        Raises:
            UnsupportedError: these rows are no tokens.
        """
        assert self._shares is not None
        total, first = sum(len(share.tokens) for share in self._shares), 0
        if num_rows != total:
            if not (self.sp and num_rows * self.tp.size == total):
                raise UnsupportedError(
                    f"several adapters on {module}",
                    f"it is called with {num_rows} rows for {total} tokens",
                    "leave it out of target_modules, or train the adapters one by one",
                )
            first = self.tp.rank * num_rows
        found, start = [], 0
        for share in self._shares:
            stop = start + len(share.tokens)
            low, high = (min(max(edge - first, 0), num_rows) for edge in (start, stop))
            found.append((share, low, high, max(first - start, 0)))
            start = stop
        return found


def linear_with_many(leaf: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + bias`, and on the tokens of each adapter that `leaf` has its own low-rank term; x `[..., in_local]`."""
    assert leaf.many is not None
    segments: list[Segment] = []
    factors: list[Tensor] = []
    for share, start, stop, skipped in leaf.many.ranges(leaf.rule.name, x.numel() // x.shape[-1]):
        if share.adapter not in leaf.scaling:
            continue
        mask = None
        if leaf.training and share.adapter in leaf.dropout:
            key = mask_key(share.seed, share.step, f"{leaf.rule.name}.lora_dropout")
            features = input_features(leaf.rule, leaf.tp).to(x.device)
            own = share.tokens[skipped : skipped + stop - start]
            mask = Mask(key, own, features, leaf.dropout[share.adapter])
        segments.append(Segment(start, stop, leaf.scaling[share.adapter], mask))
        factors += leaf.factors(share.adapter)
    if not segments:
        return frozen_linear(x, leaf.frozen_weight, bias)
    function = StackedLoraFunction if are_alike(segments, factors) else ManyLoraFunction
    y: Tensor = function.apply(x, leaf.frozen_weight, bias, tuple(segments), *factors)
    return y


def are_alike(segments: Sequence[Segment], factors: Sequence[Tensor]) -> bool:
    """Whether the products of all segments are of the same shape, of neighbouring rows, and without dropout."""
    first = segments[0]
    size = first.stop - first.start
    return (
        size > 0
        and all(s.start == first.start + place * size for place, s in enumerate(segments))
        and all(s.stop - s.start == size and s.dropout is None for s in segments)
        and len({len(a) for a in factors[::2]}) == 1
    )


class ManyLoraFunction(Function):
    """`LoraLinearFunction` with an A_k `[r_k, in]` and a B_k `[out, r_k]` for each segment k of the rows.

    forward: y = x W^T + b; then for each k, of its rows alone, z_k = D_k(x) A_k^T and y += s_k z_k B_k^T
    backward, with g = dL/dy: dx = g W; then of the rows of each k
        dz_k = s_k g B_k, dA_k = dz_k^T D_k(x), dB_k = s_k g^T z_k, dx += D_k(dz_k A_k)
    The factors of a segment without rows get a gradient of zeros: other ranks have its rows. A packed W is unpacked
    once for all segments, in either direction.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | Packed,
        bias: Tensor | None,
        segments: tuple[Segment, ...],
        *factors: Tensor,
    ) -> Tensor:
        x2 = x.reshape(-1, x.shape[-1])
        y = F.linear(x, unpacked(weight), bias)
        rows_of_y = y.view(-1, y.shape[-1])
        zs = []
        for segment, a, b in zip(segments, factors[::2], factors[1::2], strict=True):
            zs.append(segment.dropped(x2) @ a.to(x.dtype).T)
            segment.of(rows_of_y).addmm_(zs[-1], b.to(x.dtype).T, alpha=segment.scale)
        ctx.save_for_backward(x2, *factors, *zs)
        ctx.segments, ctx.weight = segments, weight
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        weight = unpacked(ctx.weight)
        number = len(ctx.segments)
        factors, zs = saved[: 2 * number], saved[2 * number :]
        g = grads[0].reshape(-1, weight.shape[0])
        dx = g @ weight if ctx.needs_input_grad[0] else None
        found: list[Tensor | None] = []
        for place, (segment, z) in enumerate(zip(ctx.segments, zs, strict=True)):
            a, b = factors[2 * place : 2 * place + 2]
            own = segment.of(g)
            dz = (own @ b.to(g.dtype)).mul_(segment.scale)
            needs_a, needs_b = ctx.needs_input_grad[4 + 2 * place : 6 + 2 * place]
            found.append((dz.T @ segment.dropped(x)).to(a.dtype) if needs_a else None)
            found.append((own.T @ z).to(b.dtype).mul_(segment.scale) if needs_b else None)
            if dx is not None and segment.dropout is None:
                segment.of(dx).addmm_(dz, a.to(g.dtype))
            elif dx is not None:
                segment.of(dx).add_(segment.dropout.drop(dz @ a.to(g.dtype)))
        dx = None if dx is None else dx.view(*grads[0].shape[:-1], weight.shape[1])
        return (dx, None, None, None, *found)


class StackedLoraFunction(Function):
    """`ManyLoraFunction` where all K segments are alike (`are_alike`): each of its products is one batched product.

    Not the product of all rows with all factors, from which what belongs together is taken: an infinity in one
    adapter's rows would reach the others' gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | Packed,
        bias: Tensor | None,
        segments: tuple[Segment, ...],
        *factors: Tensor,
    ) -> Tensor:
        x2 = x.reshape(-1, x.shape[-1])
        y = F.linear(x, unpacked(weight), bias)
        ctx.segments, ctx.weight = segments, weight
        ctx.scales = to_device(torch.tensor([s.scale for s in segments], dtype=x.dtype), x.device).view(-1, 1, 1)
        a, b = (torch.stack(side).to(x.dtype) for side in (factors[::2], factors[1::2]))  # [K, r, in], [K, out, r]
        z = (_stack_of(x2, segments) @ a.mT).mul_(ctx.scales)  # [K, t, r], scaled
        _stack_of(y.view(-1, y.shape[-1]), segments).baddbmm_(z, b.mT)
        ctx.save_for_backward(x2, *factors, z)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *factors, z = ctx.saved_tensors
        weight = unpacked(ctx.weight)
        flat = grads[0].reshape(-1, weight.shape[0])
        g = _stack_of(flat, ctx.segments)
        a, b = (torch.stack(side).to(g.dtype) for side in (factors[::2], factors[1::2]))
        dz = (g @ b).mul_(ctx.scales)
        da = (dz.mT @ _stack_of(x, ctx.segments)).to(factors[0].dtype)
        db = (g.mT @ z).to(factors[0].dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = flat @ weight
            _stack_of(dx, ctx.segments).baddbmm_(dz, a)
            dx = dx.view(*grads[0].shape[:-1], weight.shape[1])
        return (dx, None, None, None, *(one for pair in zip(da, db, strict=True) for one in pair))


def _stack_of(x: Tensor, segments: tuple[Segment, ...]) -> Tensor:
    """The rows `[T, ...]` of segments that are alike, as `[K, t, ...]`: a view."""
    return x[segments[0].start : segments[-1].stop].unflatten(0, (len(segments), -1))
