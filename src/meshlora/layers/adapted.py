"""The base of all leaves that carry adapters: factors by adapter name, assembled from those of pieces.

Owns: `AdaptedLeaf`; `Variant`, of an adapter with more than factors; `Placement`, where a leaf's part of the base is
stored; `become`, for modules that stay the model's own. Does not own: computation with the factors (`layers.linear`,
`wings.experts.module`, `wings.experts.router`), their initialization (`adapter.initialization`).
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshlora.layers.tokens import ForwardTokens, Mask
from meshlora.plan.layout import Layout


@dataclass(frozen=True)
class Placement:
    """How a rank's tensor maps to the stored one.

    Attributes:
        shape: of the stored one. is_transposed: whether the stored one is the transpose of ours.
        dim: our dim that is split over tp (None: none). layout: of that dim.
        num_experts: for a stack of experts' matrices: dim 0 is split over ep, and `dim` over etp, not tp.
        has_inputs_first: whether the stored one is `[..., in, out]`.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    layout: Layout | None = None
    is_transposed: bool = False
    num_experts: int = 0
    has_inputs_first: bool = False


class Variant(nn.Module, abc.ABC):
    """What an adapter trains on a leaf beside A and B, and makes of the leaf's product with it. Wings extend it.

    Attributes:
        parts: part -> trained tensor, by the names of `Target.further`.
    """

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.parts = nn.ParameterDict()
        for part, value in parts.items():
            self.parts[part] = nn.Parameter(value, requires_grad=False)

    @abc.abstractmethod
    def product(self, leaf: Any, adapter: str, y: Tensor, x: Tensor, mask: Mask | None) -> Tensor:
        """y `[T, out_local]` = W x + s B A D(x) of x `[T, in_local]` -> that with the variant. mask: of D, dropout."""


class AdaptedLeaf(nn.Module):
    """This rank's part of a frozen matrix, or of a stack of them, with its adapters.

    Attributes:
        in_features, out_features: local sizes.
        lora_A, lora_B: adapter name -> local factor `[..., r, in]`, `[..., out, r]`; for an adapter on pieces of a
            fused matrix, `name/piece` -> that piece's factor.
        pieces: adapter name -> its pieces, in order. scaling: adapter name -> s.
        variants: adapter name -> what it has here beside A and B, if anything.
        active: the adapter in use; None for the base alone, or for several adapters chosen by token.
        tokens: the tokens of the running forward and their adapters; None before the first adapter.
        rounds_factors: whether its products take factors in the dtype of the base (`layers.rounded`).
    """

    rounds_factors: ClassVar[bool] = True

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.pieces: dict[str, tuple[str, ...]] = {}
        self.scaling: dict[str, float] = {}
        self.variants = nn.ModuleDict()
        self.active: str | None = None
        self.tokens: ForwardTokens | None = None

    def name_at(self, path: str) -> str:
        """The name in the plan of the leaf that is the module at `path`."""
        return path

    def stored_name(self, path: str, leaf: str) -> str:
        """The name in the model before the split of its parameter `leaf`."""
        return f"{path}.{leaf}" if path else leaf

    def placement(self, parameter: Tensor) -> Placement:
        """Where its base `parameter` is stored."""
        return Placement(tuple(parameter.shape))

    def add_adapter(self, name: str, factors: Mapping[str, Tensor], *, scaling: float) -> None:
        """Attach local factors `{"A": ..., "B": ...}` (for pieces `"A.q"`, `"B.q"`, ...) as adapter `name`; frozen."""
        pieces = []
        for part, value in factors.items():
            side, _, piece = part.partition(".")
            key = f"{name}/{piece}" if piece else name
            factor = nn.Parameter(value, requires_grad=False)
            if side == "A":
                assert value.shape[-1] == self.in_features, (part, value)
                self.lora_A[key] = factor
                if piece:
                    pieces.append(piece)
            else:
                width = len(self._piece_rows(piece)) if piece else self.out_features
                assert value.shape[-2] == width, (part, value)
                self.lora_B[key] = factor
        if factors:
            self.pieces[name] = tuple(pieces)
        self.scaling[name] = scaling

    def trained(self, adapter: str) -> dict[str, nn.Parameter]:
        """The trained tensors of `adapter` on this leaf, keyed as in `add_adapter`, then those of its variant."""
        if adapter not in self.scaling:
            return {}
        found: dict[str, nn.Parameter] = {}
        if not self.pieces[adapter]:
            found = {"A": self.lora_A[adapter], "B": self.lora_B[adapter]}
        for piece in self.pieces[adapter]:
            key = f"{adapter}/{piece}"  # the name of a parameter has no dot
            found |= {f"A.{piece}": self.lora_A[key], f"B.{piece}": self.lora_B[key]}
        return found | parts_of(self.variants, adapter)

    @property
    def in_use(self) -> str | None:
        """The adapter in use, if it has factors here."""
        return self.active if self.active in self.scaling else None  # the active adapter may have other targets

    def factors(self, adapter: str) -> tuple[Tensor, Tensor]:
        """(A `[..., r, in]`, B `[..., out, r]`)."""
        return self.factor_a(adapter), self.factor_b(adapter)

    def factor_a(self, adapter: str) -> Tensor:
        """`[..., r, in]`; for k pieces their factors stacked, `[..., k r, in]`."""
        pieces = self.pieces[adapter]
        if not pieces:
            return self.lora_A[adapter]
        return torch.cat([self.lora_A[f"{adapter}/{piece}"] for piece in pieces], -2)

    def factor_b(self, adapter: str) -> Tensor:
        """`[..., out, r]`; for k pieces `[..., out, k r]`, zero outside their blocks."""
        pieces = self.pieces[adapter]
        if not pieces:
            return self.lora_B[adapter]
        blocks = []
        for piece in pieces:
            b = self.lora_B[f"{adapter}/{piece}"]
            rows = self._piece_rows(piece).to(b.device)
            whole = b.new_zeros(*b.shape[:-2], self.out_features, b.shape[-1])
            blocks.append(whole.index_copy(-2, rows, b))  # out of place: b gets its gradient through it
        return torch.cat(blocks, -1)

    def _piece_rows(self, piece: str) -> Tensor:
        """The local row indices of `piece`."""
        raise AssertionError(f"{type(self).__name__} has no pieces, and {piece!r} is none")


def variant_of(variants: nn.ModuleDict, adapter: str) -> Variant | None:
    """That of `adapter`, if it has one."""
    if adapter not in variants:
        return None
    found = variants[adapter]
    assert isinstance(found, Variant), found
    return found


def parts_of(variants: nn.ModuleDict, adapter: str) -> dict[str, nn.Parameter]:
    """The trained tensors of the variant of `adapter`, by part."""
    variant = variant_of(variants, adapter)
    return {} if variant is None else dict(variant.parts.items())


def become(module: nn.Module, own: type) -> None:
    """Mix the class `own` into a module in place: its methods come before the model's own."""
    base: Any = type(module)
    module.__class__ = _class(own, base)  # its parameters, buffers and hooks stay


@functools.cache
def _class(own: type, base: Any) -> Any:
    return type(f"Parallel{base.__name__}", (own, base), {})
