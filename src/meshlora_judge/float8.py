"""The reference's products in float8: every `nn.Linear` but head and routers multiplies rounded numbers.

Weights that are float8 already, as a checkpoint stores them, or rounded as one would, are multiplied as they are. The
formulas of docs/quantization.md are written a second time, on whole matrices and by a table of all numbers: nothing
here knows that a matrix can be split.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshlora_judge.packed import float8_modules
from meshlora_judge.quantized import plain_linears

_takes_inputs_exactly = ContextVar("_takes_inputs_exactly", default=False)
_BLOCK, _TOKEN_BLOCK, _MOST, _LEAST = 128, 32, 448.0, -126


@torch.no_grad()
def multiply_in_float8(
    model: Any, compute: str | None, *, quantization: str | None = None, folder: str | Path | None = None
) -> None:
    """Give the linears of `model` the products of `model.compute`: fp8, fp8_backward; None changes nothing.

    quantization: of the weights of `model`, which are whole and plain: fp8: all are rounded already; keep: those are
    that `folder` stores in e4m3, and the others have plain products.
    """
    if compute is None:
        return
    names = {module: name for name, module in model.named_modules()}
    stored = float8_modules(folder) if quantization == "keep" and folder is not None else ()
    for module in plain_linears(model):
        if not isinstance(module, nn.Linear):  # transposed: gpt2's
            continue
        if quantization == "keep" and not _is_one_of(names[module], stored):
            continue
        # What is float8 already is the one set of numbers of both directions.
        rounded = _of_weight(module.weight) if quantization is None else module.weight.detach().clone()
        if compute == "fp8":
            module.weight.copy_(rounded)
        forward = functools.partial(_forward, module, rounded, is_forward=compute == "fp8")
        setattr(module, "forward", forward)  # noqa: B010 # a method, to mypy


def _is_one_of(name: str, stored: Collection[str]) -> bool:
    """Whether `stored` has the module `name`: one of the two may have a prefix more, as classes with a head have."""
    return any(f".{name}".endswith(f".{key}") or f".{key}".endswith(f".{name}") for key in stored)


@contextlib.contextmanager
def exact_inputs() -> Iterator[None]:
    """Inside, inputs are not rounded, for logits of two adapters that differ by the rounding of a file: numbers that
    fall on either side of a tie would show it a million times as large."""
    token = _takes_inputs_exactly.set(True)
    try:
        yield
    finally:
        _takes_inputs_exactly.reset(token)


def _forward(module: nn.Linear, rounded: Tensor, x: Tensor, *, is_forward: bool) -> Tensor:
    y: Tensor = _Product.apply(x, module.weight, rounded, is_forward and not _takes_inputs_exactly.get())
    return y if module.bias is None else y + module.bias  # which may be trained, by the gradient as it is


class _Product(Function):
    """`y = Q(x) W^T`, or `x W^T`; dx = Q(g) times the rounded W, as if Q(x) were x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounded: Tensor, is_forward: bool) -> Tensor:
        ctx.rounded = rounded
        return (_of_tokens(x) if is_forward else x) @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _of_tokens(grads[0]) @ ctx.rounded, None, None, None


def _of_weight(matrix: Tensor) -> Tensor:
    """Each block of 128 x 128, the last ones smaller."""
    exact, rounded = matrix.float(), torch.empty_like(matrix)
    for top in range(0, matrix.shape[0], _BLOCK):
        for left in range(0, matrix.shape[1], _BLOCK):
            place = slice(top, top + _BLOCK), slice(left, left + _BLOCK)
            rounded[place] = _rounded(exact[place]).to(matrix.dtype)
    return rounded


def _of_tokens(x: Tensor) -> Tensor:
    """Each 32 features of a token, the last ones fewer."""
    parts = []
    for part in x.split(_TOKEN_BLOCK, -1):
        rows = part.reshape(-1, part.shape[-1])
        rounded = [_rounded(rows, dim=1)] if len(rows) else [rows]
        parts.append(torch.cat(rounded).view(part.shape).to(x.dtype))
    return torch.cat(parts, -1)


def _rounded(block: Tensor, dim: int | None = None) -> Tensor:
    """`block`, or each row of it, to e4m3 numbers times the least power of two by which none is above 448."""
    exact = block.double()
    largest = exact.abs().amax() if dim is None else exact.abs().amax(dim, keepdim=True)
    exponent = torch.log2(largest / _MOST).ceil()
    exponent = torch.where(largest == 0, torch.zeros_like(exponent), exponent)
    # A logarithm is rounded: by one too low or too high, perhaps.
    exponent = torch.where(largest > _MOST * 2.0**exponent, exponent + 1, exponent)
    exponent = torch.where((largest > 0) & (largest <= _MOST * 2.0 ** (exponent - 1)), exponent - 1, exponent)
    scale = 2.0 ** exponent.clamp(min=_LEAST)
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().to(block.device)
    middles = (numbers[:-1] + numbers[1:]) / 2
    scaled = exact.abs() / scale
    below = torch.searchsorted(middles, scaled)
    is_tie = scaled == middles[below.clamp(max=len(middles) - 1)]
    nearest = numbers[below + (is_tie & (below % 2 == 1)).long()]  # of two, the even code
    return nearest * scale * exact.sign()
