"""Dropout on a mesh: the model's own modules, LoRA's on the input of a linear, and which tokens they see.

Owns: `DropoutTokens`, what a forward is told of its tokens; `Mask`, which a layer applies; `TokenDropout`, in the place
of the model's `nn.Dropout`. Does not own: the bits of masks (`meshlora.dropout`), which dropouts are exact
(`plan.dropout`), what the tokens of a batch are called (`data.collate`).

A module sees all tokens of a forward or, under sp between regions, its rank's slice of them; it can tell by their
number. Masks are made when they are needed, in the backward once more: no mask outlives the layer that applies it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshlora.dropout import keep_mask, mask_key
from meshlora.errors import UnsupportedError, UserError
from meshlora.parallel.groups import Axis
from meshlora.plan.dropout import is_exact_module
from meshlora.plan.layout import Split
from meshlora.plan.rules import LinearRule


@dataclass(frozen=True)
class Mask:
    """The mask of one call of a module.

    Attributes:
        key: of `meshlora.dropout.mask_key`. tokens: int64 `[T]`, the numbers of the rows. features: int64 `[H]`, those
            of the columns in the whole matrix. p: the share that is dropped.
    """

    key: int
    tokens: Tensor
    features: Tensor
    p: float

    def drop(self, x: Tensor) -> Tensor:
        """x `[T, H]` -> x keep / (1 - p), in new memory. Linear and its own adjoint."""
        keep = keep_mask(self.key, self.tokens, self.features, self.p)
        return x.masked_fill(keep.logical_not_(), 0).mul_(1 / (1 - self.p))


class DropoutTokens:
    """What the running forward is told of its tokens; one for each model, shared by its layers.

    sp: under it a rank's modules between regions see `tensor_split(tp)[rank]` of the flat tokens.
    """

    def __init__(self, tp: Axis, *, sp: bool) -> None:
        self.tp, self.sp = tp, sp
        self._seed = self._step = 0
        self._tokens: Tensor | None = None

    @contextlib.contextmanager
    def at(self, seed: int, step: int, tokens: Tensor) -> Iterator[None]:
        """Inside the block forwards and backwards are of optimizer step `step` and of `tokens`, int64 `[B, S]`."""
        before = self._seed, self._step, self._tokens
        self._seed, self._step, self._tokens = seed, step, tokens.flatten()
        try:
            yield
        finally:
            self._seed, self._step, self._tokens = before

    def mask(self, module: str, p: float, num_rows: int, features: Tensor) -> Mask:
        """The mask for `num_rows` rows that `module` is called with.

        Raises:
            UserError: nobody has said which tokens these are. UnsupportedError: they are no tokens.
        """
        return Mask(mask_key(self._seed, self._step, module), self._rows(module, num_rows), features, p)

    def _rows(self, module: str, num_rows: int) -> Tensor:
        if self._tokens is None:
            raise UserError(
                f"a forward in training with dropout in {module}",
                "masks are a function of the step and the tokens, and nobody has said which they are",
                "call it inside `model.meshlora.dropout.at(seed, step, tokens)`, or use model.eval(), or no dropout",
            )
        if num_rows == len(self._tokens):
            return self._tokens
        if self.sp and num_rows * self.tp.size == len(self._tokens):
            return self._tokens.tensor_split(self.tp.size)[self.tp.rank]
        raise UnsupportedError(
            f"dropout in {module}",
            f"it is called with {num_rows} rows for {len(self._tokens)} tokens",
            "leave it out of target_modules, or set lora_dropout: 0",
        )


def input_features(rule: LinearRule, tp: Axis) -> Tensor:
    """int64 `[in_local]`: which of the whole matrix's input features this rank's part has."""
    if rule.split is Split.ROW and rule.layout is not None:
        return rule.layout.rows(rank=tp.rank, size=tp.size)
    return torch.arange(rule.in_features)


class _DropFunction(Function):
    """y = x keep / (1 - p), x `[T, H]`; nothing of the size of x is saved."""

    @staticmethod
    def forward(ctx: object, x: Tensor, mask: Mask) -> Tensor:
        ctx.mask = mask  # type: ignore[attr-defined]
        return mask.drop(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.mask.drop(grads[0]), None  # type: ignore[attr-defined]


class TokenDropout(nn.Module):
    """In the place of an `nn.Dropout` on hidden states, alike on all tp ranks.

    name: of the module in the whole model.
    """

    def __init__(self, name: str, p: float, tokens: DropoutTokens) -> None:
        super().__init__()
        self.name, self.p, self._tokens = name, p, tokens

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., H]`, all tokens or this rank's -> the same shape."""
        if not self.training:
            return x
        flat = x.reshape(-1, x.shape[-1])
        mask = self._tokens.mask(self.name, self.p, len(flat), torch.arange(flat.shape[1], device=x.device))
        return _DropFunction.apply(flat, mask).view(x.shape)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def replace_dropouts(model: nn.Module, model_type: str, tokens: DropoutTokens) -> None:
    """Put `TokenDropout` in the place of the model's exact dropouts that drop anything."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout) and module.p > 0 and is_exact_module(model_type, name):
            model.set_submodule(name, TokenDropout(name, module.p, tokens))
