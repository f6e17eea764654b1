"""Dropout on a mesh: that of the model's own modules, and the input features that LoRA's dropout sees.

Owns: `TokenDropout`, which replaces the model's `nn.Dropout`. Does not own: the tokens of a module and their masks
(`layers.tokens`), mask bits (`meshlora_ground.masks`), which dropouts are exact (`plan.own_dropouts`), the numbering of
a batch's tokens (`train.batch`).

Masks are computed on use, and again in the backward: no mask outlives the layer that applies it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshlora.comm.groups import Axis
from meshlora.layers.tokens import ForwardTokens, Mask
from meshlora.plan.layout import Split
from meshlora.plan.own_dropouts import is_exact_module
from meshlora.plan.rules import LinearRule


def input_features(rule: LinearRule, tp: Axis, device: torch.device | str = "cpu") -> Tensor:
    """int64 `[in_local]`: the input features of the whole matrix that this rank holds."""
    if rule.split is Split.ROW and rule.layout is not None and tp.size > 1:
        return rule.layout.rows(rank=tp.rank, size=tp.size)
    return torch.arange(rule.in_features, device=device)  # column-parallel and whole linears see all of them


class DropFunction(Function):
    """y = x keep / (1 - p), x `[T, H]`; nothing of x's size is saved. masks: of consecutive rows, in order."""

    @staticmethod
    def forward(ctx: object, x: Tensor, masks: Sequence[Mask]) -> Tensor:
        ctx.masks = masks  # type: ignore[attr-defined]
        return _dropped(x, masks)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return _dropped(grads[0], ctx.masks), None  # type: ignore[attr-defined]


def _dropped(x: Tensor, masks: Sequence[Mask]) -> Tensor:
    dropped, row = [], 0
    for mask in masks:
        stop = row + len(mask.tokens)
        dropped.append(mask.drop(x[row:stop]))
        row = stop
    assert row == len(x), (row, x.shape)
    return dropped[0] if len(dropped) == 1 else torch.cat(dropped)  # mostly one: no copy then


class TokenDropout(nn.Module):
    """Replaces an `nn.Dropout` on hidden states; identical on all tp ranks.

    name: the module's name in the whole model.
    """

    def __init__(self, name: str, p: float, tokens: ForwardTokens) -> None:
        super().__init__()
        self.name, self.p, self._tokens = name, p, tokens

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., H]`, all tokens or this rank's -> the same shape."""
        if not self.training or not self.p:  # as nn.Dropout
            return x
        flat = x.reshape(-1, x.shape[-1])
        features = torch.arange(flat.shape[1], device=x.device)
        parts = self._tokens.parts(self.name, len(flat))
        masks = [self._tokens.mask(self.name, self.p, part, features) for part in parts]
        return DropFunction.apply(flat, masks).view(x.shape)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def replace_dropouts(model: nn.Module, model_type: str, tokens: ForwardTokens) -> None:
    """Replace the model's exact dropouts with p > 0 by `TokenDropout`."""
    for name, module in list(model.named_modules()):  # a list: modules are replaced meanwhile
        if isinstance(module, nn.Dropout) and module.p > 0 and is_exact_module(model_type, name):
            model.set_submodule(name, TokenDropout(name, module.p, tokens))
