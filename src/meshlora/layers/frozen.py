"""Frozen matrices of the base, in plain numbers or in few bits.

Owns: what is asked of a matrix in few bits (`FewBits`), the leaf that holds either kind (`FrozenMatrix`), and the
products with a frozen matrix. Does not own: formats, packing and unpacking, which a wing brings (`wings.quantized`).

A matrix in few bits is unpacked for the duration of one product. The backward unpacks it again: the unpacked one is
never saved. It may round what it is multiplied with (`entering`, `returning`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


class Form(Protocol):
    """How codes and scales are a matrix."""

    @property
    def holds_numbers(self) -> bool:
        """Whether the codes are the plain numbers."""

    def matrix(self, codes: Tensor, scales: Tensor) -> FewBits:
        """The matrix, or the stack of them, that they are."""


class FewBits(ABC):
    """A matrix, or a stack `[E, ...]` of them, in few bits.

    Attributes:
        codes: uint8. scales: of blocks of them. form: how the two are a matrix.
        has_forward, has_backward: whether kernels of its own multiply by it, `write_product` and `gradient`, which
            cannot add to what is there.
    """

    codes: Tensor
    scales: Tensor
    form: Form
    has_forward: bool = False
    has_backward: bool = False

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the plain weight."""

    @property
    @abstractmethod
    def mT(self) -> FewBits:
        """The transpose of the last two dims."""

    @abstractmethod
    def __len__(self) -> int:
        """The size of the first dim of the plain weight."""

    @abstractmethod
    def __getitem__(self, expert: int) -> Tensor:
        """The matrix of one expert of a stack, unpacked."""

    @abstractmethod
    def whole(self) -> Tensor:
        """The plain weight."""

    def entering(self, x: Tensor) -> Tensor:
        """x `[T, in]` as the product of the forward takes it."""
        return x

    def returning(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """g `[T, out]` and the weight as the product of the backward takes them."""
        return g, self.whole()

    def write_product(self, y: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """Write `x W^T + bias` over y `[T, out]`."""
        write_product(y, self.entering(x), self.whole(), bias)

    def gradient(self, g: Tensor) -> Tensor:
        """`g W` `[T, in]`, a new tensor."""
        g, weight = self.returning(g)
        return g @ weight


class FrozenMatrix(nn.Module):
    """A leaf with a frozen `weight`, packed or not.

    Attributes:
        weight: the plain weight, or its codes. form: how it is packed; None if it is not; else `weight_scales` has the
            scales.
    """

    weight: nn.Parameter
    weight_scales: nn.Parameter
    form: Form | None = None

    def hold(self, packed: FewBits) -> None:
        """Hold the weight packed from now on."""
        self.weight = nn.Parameter(packed.codes, requires_grad=False)
        self.weight_scales = nn.Parameter(packed.scales, requires_grad=False)
        self.form = packed.form

    @property
    def frozen_weight(self) -> Tensor | FewBits:
        """The weight in the form that products take."""
        if self.form is None:
            return self.weight
        # Another dtype than that of codes: whole weights were put there, as by a merge.
        if self.weight.dtype != torch.uint8 and not self.form.holds_numbers:
            return self.weight
        return self.form.matrix(self.weight, self.weight_scales)


class _PackedLinear(Function):
    """`y = x W^T + b` with W packed and frozen; dx = g W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FewBits, bias: Tensor | None) -> Tensor:
        ctx.weight = weight  # no tensor: `save_for_backward` would refuse it
        y = x.new_empty(*x.shape[:-1], weight.shape[0])
        weight.write_product(y.view(-1, weight.shape[0]), x.reshape(-1, x.shape[-1]), bias)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        g = grads[0]
        dx = gradient_of_input(g.reshape(-1, g.shape[-1]), ctx.weight)
        return dx.view(*g.shape[:-1], dx.shape[-1]), None, None


def write_product(y: Tensor, x: Tensor, weight: Tensor | FewBits, bias: Tensor | None) -> None:
    """Write `x W^T + bias` over y `[T, out]`, of a W packed or not."""
    if isinstance(weight, FewBits):
        weight.write_product(y, x, bias)
    elif bias is None:
        torch.mm(x, weight.T, out=y)
    else:
        torch.addmm(bias, x, weight.T, out=y)


def frozen_linear(x: Tensor, weight: Tensor | FewBits, bias: Tensor | None) -> Tensor:
    """`y = x W^T + b` of a frozen W, packed or not."""
    if isinstance(weight, FewBits):
        return _PackedLinear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


def gradient_of_input(g: Tensor, weight: Tensor | FewBits, so_far: Tensor | None = None) -> Tensor:
    """`g W` `[T, in]`, added to `so_far` in place if that is given."""
    if isinstance(weight, FewBits):
        if so_far is None:
            return weight.gradient(g)
        if weight.has_backward:
            return so_far.add_(weight.gradient(g))
        g, weight = weight.returning(g)
    return g @ weight if so_far is None else so_far.addmm_(g, weight)


def unpacked(weight: Tensor | FewBits) -> Tensor:
    """The plain weight, packed or not."""
    return weight.whole() if isinstance(weight, FewBits) else weight
