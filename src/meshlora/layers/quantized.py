"""Frozen matrices in few bits: packed in memory, and whole again for as long as one product takes.

Owns: packing a rank's part of a matrix, what autograd keeps of it, the product without an adapter, and the view of
plain weights. Does not own: which matrices these are and where their blocks may be cut (`plan.quantization`); the
arithmetic of quantising, which is that of bitsandbytes, on CPUs as on GPUs.

A backward needs the matrix once more: it is unpacked again there, never kept.
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
    """bitsandbytes' functions. Imported where they are needed: it takes seconds."""
    import bitsandbytes.functional

    return bitsandbytes.functional


@dataclass(frozen=True)
class Packed:
    """A matrix `[out, in]` in few bits.

    Attributes:
        codes: uint8 `[out, in]`, of 4 bits `[out, in/2]`. absmax: float32 `[out, in/64]`, the scale of each block.
        kind: of `plan.quantization.KINDS`. dtype: of the matrix that was packed.
    """

    codes: Tensor
    absmax: Tensor
    kind: str
    dtype: torch.dtype

    @torch.no_grad()
    def whole(self) -> Tensor:
        """`[out, in]`: in float32 what the library makes of it, then rounded to `dtype`.

        Of 4 bits, on CPUs, the library rounds by itself, in the same pass.
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
    """`[out, in]`, whatever it is held as."""
    return weight.whole() if isinstance(weight, Packed) else weight


@torch.no_grad()
def pack(weight: Tensor, kind: str) -> Packed:
    """`[out, in]` in few bits; 64 must divide `in`. The numbers of a block depend on its own alone."""
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
    """The 256 of them, float32, as the library computes them: on a device that has content."""
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
    """Inside the block every packed matrix is a plain one, for those who look at weights."""
    packed = [(m, m.weight, m.frozen_weight) for m in model.modules() if isinstance(getattr(m, "quantized", None), str)]
    for module, _, frozen in packed:
        assert isinstance(frozen, Packed)
        module.weight = nn.Parameter(frozen.whole(), requires_grad=False)
    try:
        yield
    finally:
        for module, codes, _ in packed:
            module.weight = codes
