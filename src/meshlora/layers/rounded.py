"""Factors in the dtype of the base: rounded once a forward, all in one kernel, not on each use.

Owns: the rounded copies and the product whose result is not rounded. Does not own: who uses them (`layers.products`,
`wings.kernels.shared_input`, `wings.kernels.early_a`), which factors are in use (`adapter.attach`).

Copies are made when the model's forward begins and forgotten when it ends: none can outlive a change of its factor,
whoever makes it. A version number would not do as a key: torch's fused AdamW changes parameters without a new one. A
backward uses the copies that its forward saved. Outside a forward of the whole model a factor is rounded where it is
used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshlora.layers.adapted import AdaptedLeaf
from meshlora.layers.notes import forget, note, noted
from meshlora_ground.compat.torch_tensors import copy_each

_ALIGNED = 8  # elements, 16 bytes or more: where grouped products take their arguments


class _Rounded(NamedTuple):
    """The note on a factor: its copy, which is the part of `flat` that begins at `start`."""

    copy: Tensor
    flat: Tensor
    start: int


def rounded(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`factor` in `dtype`: itself, the copy of the running forward, or a new one."""
    if factor.dtype == dtype:
        return factor
    found = noted(factor, _Rounded)
    if found is None or found.copy.dtype != dtype:
        return factor.to(dtype)
    return found.copy


def stacked(factors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`[r_1, in]`, `[r_2, in]`, ... -> `[r_1 + r_2 + ..., in]` in `dtype`: no new tensor where their copies lie one
    after the other."""
    if len(factors) == 1:
        return rounded(factors[0], dtype)
    found = [noted(factor, _Rounded) for factor in factors]
    first = found[0]
    if first is not None and first.copy.dtype == dtype:
        stop = first.start
        for factor, own in zip(factors, found, strict=True):
            if own is None or own.flat is not first.flat or own.start != stop or not factor.is_contiguous():
                break
            stop += factor.numel()
        else:
            return first.flat[first.start : stop].view(-1, factors[0].shape[1])
    return torch.cat([rounded(factor, dtype) for factor in factors])


def round_each(factors: Iterable[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    """Make the copies; returns the factors that have one now. Of fresh memory: an earlier forward may wait for its
    backward."""
    wide = [factor for factor in factors if factor.dtype != dtype]
    if not wide:
        return []
    sizes = [-(-factor.numel() // _ALIGNED) * _ALIGNED for factor in wide]
    flat = torch.empty(sum(sizes), dtype=dtype, device=wide[0].device)
    copies = [_laid_out(part[: factor.numel()], factor) for part, factor in zip(flat.split(sizes), wide, strict=True)]
    with torch.no_grad():
        copy_each(copies, [factor.detach() for factor in wide])  # one kernel for all
    start = 0
    for factor, copy, size in zip(wide, copies, sizes, strict=True):
        note(factor, _Rounded(copy, flat, start))
        start += size
    return wide


def _laid_out(flat: Tensor, like: Tensor) -> Tensor:
    """`flat` in the shape of `like`, and with its last two dims in the same order in memory."""
    if like.is_contiguous():
        return flat.view(like.shape)
    return flat.view(like.mT.shape).mT


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """`s left right`, rounded once: left `[m, k]`, right `[k, n]`."""
    if scale == 1:
        return left @ right
    return left.new_empty(len(left), right.shape[1]).addmm_(left, right, beta=0, alpha=scale)


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`left right`, `[m, k]` and `[k, n]`, in `dtype`, as wide or wider. A GPU sums in float32 and hands that out."""
    if left.dtype == dtype or left.is_cpu or left.ndim > 2:
        return (left @ right).to(dtype)
    return torch.mm(left, right, out_dtype=dtype)  # without it the result is rounded to the dtype of the factors


class Rounding:
    """Rounds the factors in use for the length of each forward of a model.

    leaves: the linears and experts that may have adapters, kept by whoever adds these.
    """

    def __init__(self) -> None:
        self.leaves: Sequence[AdaptedLeaf] = ()
        self._held: list[nn.Parameter] = []

    def watch(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Begin with the next forward of `model`. dtype: of the base."""

        def enter(*_: Any) -> None:
            self._held = round_each(self._in_use(), dtype)

        def leave(*_: Any) -> None:
            for factor in self._held:
                forget(factor, _Rounded)
            self._held = []

        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave, always_call=True)  # a forward that fails leaves none either

    def _in_use(self) -> list[nn.Parameter]:
        """All A, then all B: those of linears that share an input are neighbours, and `stacked` as they lie."""
        every_a, every_b = [], []
        for leaf in self.leaves:
            for name, pieces in leaf.pieces.items():
                if pieces:  # their factors are put together on each use
                    continue
                a, b = leaf.lora_A[name], leaf.lora_B[name]
                if name == leaf.active or (leaf.active is None and b.requires_grad):
                    every_a.append(a)
                    every_b.append(b)
        return every_a + every_b
