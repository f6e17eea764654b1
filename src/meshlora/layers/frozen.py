"""Frozen matrices of the base, in plain numbers or in few bits.

Owns: what is asked of a matrix in few bits (`FewBits`), the leaf that holds either kind (`FrozenMatrix`), and the
product without an adapter. Does not own: formats, packing and unpacking, which a wing brings (`wings.quantized`).

A matrix in few bits is unpacked for the duration of one product. The backward unpacks it again: the unpacked one is
never saved.
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

    def matrix(self, codes: Tensor, scales: Tensor) -> FewBits:
        """The matrix, or the stack of them, that they are."""


class FewBits(ABC):
    """A matrix, or a stack `[E, ...]` of them, in few bits.

    Attributes:
        codes: uint8. scales: of blocks of them. form: how the two are a matrix.
    """

    codes: Tensor
    scales: Tensor
    form: Form

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
        # Another dtype: whole weights were put there, as by a merge.
        if self.form is None or self.weight.dtype != torch.uint8:
            return self.weight
        return self.form.matrix(self.weight, self.weight_scales)


class _PackedLinear(Function):
    """`y = x W^T + b` with W packed and frozen; dx = g W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FewBits, bias: Tensor | None) -> Tensor:
        ctx.weight = weight  # no tensor: `save_for_backward` would refuse it
        return F.linear(x, weight.whole(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ ctx.weight.whole(), None, None


def frozen_linear(x: Tensor, weight: Tensor | FewBits, bias: Tensor | None) -> Tensor:
    """`y = x W^T + b` of a frozen W, packed or not."""
    if isinstance(weight, FewBits):
        y: Tensor = _PackedLinear.apply(x, weight, bias)
        return y
    return F.linear(x, weight, bias)


def unpacked(weight: Tensor | FewBits) -> Tensor:
    """The plain weight, packed or not."""
    return weight.whole() if isinstance(weight, FewBits) else weight
