"""Quantised frozen matrices: packed in memory, and unpacked for the duration of one product.

Owns: packing a rank's part of a matrix, what autograd saves of it, the product without an adapter, and the view as
plain weights. Does not own: which matrices are quantised and where their blocks may be split (`plan.quantization`); the
arithmetic of quantisation, which is bitsandbytes', on CPUs as on GPUs.

The backward unpacks the matrix again; the unpacked one is never saved.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from meshlora.common.errors import UserError
from meshlora.plan.quantization import BLOCK


def check_library(kind: str | None) -> None:
    """Refuse quantisation where bitsandbytes is not installed.

    Raises:
        UserError: it is not.
    """
    if kind is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"quantization {kind}", "it needs bitsandbytes", "pip install 'meshlora[quantization]'")


def _functional() -> Any:
    """bitsandbytes' functions. Imported on use: it takes seconds."""
    import bitsandbytes.functional

    return bitsandbytes.functional


@dataclass(frozen=True)
class Packed:
    """A quantised matrix `[out, in]`.

    Attributes:
        codes: uint8 `[out, in]`, with 4 bits `[out, in/2]`. absmax: float32 `[out, in/64]`, the scale of each block.
        kind: one of `plan.quantization.KINDS`. dtype: that of the original matrix.
    """

    codes: Tensor
    absmax: Tensor
    kind: str
    dtype: torch.dtype

    @torch.no_grad()
    def whole(self) -> Tensor:
        """`[out, in]`: unpacked to float32 by the library, then rounded to `dtype`.

        With 4 bits on CPUs the library itself rounds, in the same pass.
        """
        library, shape = _functional(), torch.Size((len(self.absmax), self.absmax.shape[1] * BLOCK))
        absmax = self.absmax.reshape(-1)
        if self.kind == "nf4":
            code = library.get_4bit_type("nf4", device=self.codes.device)
            rounds = self.codes.is_cpu and self.dtype != torch.float64
            dtype = self.dtype if rounds else torch.float32
            state = library.QuantState(absmax, shape=shape, code=code, blocksize=BLOCK, quant_type="nf4", dtype=dtype)
            found: Tensor = library.dequantize_4bit(self.codes.reshape(-1, 1), state)
        else:
            found = library.dequantize_blockwise(
                self.codes.reshape(shape), absmax=absmax, code=_levels(self.codes.device), blocksize=BLOCK
            )
        return found.view(shape).to(self.dtype)


def unpacked(weight: Tensor | Packed) -> Tensor:
    """`[out, in]`, packed or not."""
    return weight.whole() if isinstance(weight, Packed) else weight


@torch.no_grad()
def pack(weight: Tensor, kind: str) -> Packed:
    """Quantise `[out, in]`; 64 must divide `in`. The codes of a block depend on its own elements alone."""
    rows = len(weight)
    assert weight.shape[1] % BLOCK == 0, tuple(weight.shape)
    library, exact = _functional(), weight.float().contiguous()
    if kind == "nf4":
        codes, state = library.quantize_4bit(exact, blocksize=BLOCK, quant_type="nf4")
    else:
        codes, state = library.quantize_blockwise(exact, code=_levels(weight.device), blocksize=BLOCK)
    return Packed(codes.view(rows, -1), state.absmax.view(rows, -1), kind, weight.dtype)


def _levels(device: torch.device) -> Tensor:
    """-1, -126/127, ..., 1, and a second zero."""
    return torch.tensor(levels_of_int8(), device=device)


@functools.cache
def levels_of_int8() -> tuple[float, ...]:
    """The 256 levels, float32, as the library computes them: not under the meta device."""
    return tuple(_functional().create_linear_map(signed=True, total_bits=8).tolist())


class _PackedLinear(Function):
    """`y = x W^T + b` with W packed and frozen; dx = g W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.whole(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ ctx.weight.whole(), None, None


def frozen_linear(x: Tensor, weight: Tensor | Packed, bias: Tensor | None) -> Tensor:
    """`y = x W^T + b` of a frozen W, packed or not."""
    if isinstance(weight, Packed):
        y: Tensor = _PackedLinear.apply(x, weight, bias)
        return y
    return F.linear(x, weight, bias)


@contextlib.contextmanager
def plain_weights(model: nn.Module) -> Iterator[None]:
    """Inside the block every packed matrix is a plain one, for code that reads weights."""
    packed = [(m, m.weight, m.frozen_weight) for m in model.modules() if isinstance(getattr(m, "quantized", None), str)]
    for module, _, frozen in packed:
        assert isinstance(frozen, Packed)
        module.weight = nn.Parameter(frozen.whole(), requires_grad=False)
    try:
        yield
    finally:
        for module, codes, _ in packed:
            module.weight = codes
