"""Checkpoint weights in few bits: from stored codes and scales to plain numbers, for the slice that a rank holds.

Owns: the formats, and the arithmetic of each. Does not own: which tensors belong together (`model.stored`), reading
them (`model.weights`), bases that meshlora itself quantises (`layers.quantized`).

- fp8: a float8 value times the float32 scale of its block (DeepSeek-V3, section 3.3); scales may be stored as exponents
  alone (ue8m0).
- mxfp4: blocks of 32 input features, a 4-bit value (E2M1) times a power of two (OCP Microscaling Formats 1.0). gpt-oss
  stores matrices of experts as `[expert, output, block, 16 bytes]`, of which its model holds the transpose.

A cut may cross a block: the block is read whole, and its scale is that of the checkpoint on every topology.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshlora.common.errors import UnsupportedError, UserError

# (start, stop) along each dim.
Bounds = Sequence[tuple[int, int]]
Reader = Callable[[Bounds], Tensor]

FLOAT8 = ("F8_E4M3", "F8_E5M2")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MX_BLOCK = 32


def check_packing(quantization: Any, what: str) -> None:
    """Refuse a `quantization_config` of a config.json whose weights cannot be read.

    Raises:
        UnsupportedError: another method. UserError: it is malformed.
    """
    given = quantization if isinstance(quantization, Mapping) else {}
    method = given.get("quant_method")
    if method not in ("fp8", "mxfp4") or given.get("expert_dtype", "fp8") != "fp8":
        raise UnsupportedError(
            f"{what}: quantization_config with quant_method {method!r}",
            "of checkpoints that are quantised only fp8 and mxfp4 are read",
            "use the checkpoint that it was made from",
        )
    block = given.get("weight_block_size")
    is_block = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if block is not None and not is_block:
        raise UserError(f"{what}: weight_block_size {block!r}", "it must be [rows, columns]", "download it again")


@dataclass(frozen=True)
class BlockFloat8:
    """float8 values with a scale for each block. block: its size along each dim."""

    block: tuple[int, ...]

    @staticmethod
    def of(codes: tuple[int, ...], scales: tuple[int, ...], block: Sequence[int] | None) -> BlockFloat8 | None:
        """The format of tensors of these shapes: one scale for all, one for each row, or one for each `block` of the
        last two dims; None if they do not fit.
        """
        if math.prod(scales) == 1:
            return BlockFloat8(codes)
        if scales in (codes[:1], (*codes[:-1], 1)):
            return BlockFloat8((*(1 for _ in codes[:-1]), codes[-1]))
        whole = (*(1 for _ in codes[:-2]), *(block or ()))
        fits = len(whole) == len(codes) and scales == tuple(-(-n // size) for n, size in zip(codes, whole, strict=True))
        return BlockFloat8(whole) if fits else None

    def shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the weight."""
        return codes

    def read(self, bounds: Bounds, codes: Reader, scales: Reader) -> Tensor:
        """The slice `bounds` of the weight, in float32."""
        value = codes(bounds).float()
        touched = [(start // size, -(-stop // size)) for (start, stop), size in zip(bounds, self.block, strict=True)]
        factor = _plain_scales(scales(touched)).reshape([stop - start for start, stop in touched])
        for dim, ((start, stop), size) in enumerate(zip(bounds, self.block, strict=True)):
            factor = factor.index_select(dim, torch.arange(start, stop) // size - start // size)
        return value.mul_(factor)


@dataclass(frozen=True)
class Mxfp4:
    """4-bit values of experts' matrices with a power of two for each 32 input features; held transposed."""

    def shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the weight, `[experts, inputs, outputs]`."""
        experts, outputs, blocks, _ = codes
        return experts, blocks * _MX_BLOCK, outputs

    def read(self, bounds: Bounds, codes: Reader, scales: Reader) -> Tensor:
        """The slice `bounds` of the weight, in float32; one expert at a time, as its codes alone need little memory."""
        (first, last), (start, stop), outputs = bounds
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        blocks = (start // _MX_BLOCK, -(-stop // _MX_BLOCK))
        offset = blocks[0] * _MX_BLOCK
        whole = torch.empty(last - first, stop - start, outputs[1] - outputs[0])
        for place, expert in enumerate(range(first, last)):
            one = (expert, expert + 1)
            pairs = codes([one, outputs, blocks, (0, _MX_BLOCK // 2)])[0].int()
            values = torch.stack([table[pairs & 15], table[pairs >> 4]], -1).flatten(-2)  # low nibble first
            exponents = scales([one, outputs, blocks])[0].int() - 127
            values = torch.ldexp(values, exponents[..., None]).flatten(-2)
            whole[place] = values[:, start - offset : stop - offset].T
        return whole


Packing = BlockFloat8 | Mxfp4


def _plain_scales(scales: Tensor) -> Tensor:
    if scales.dtype == torch.uint8:  # exponents, without their type
        return (scales.float() - 127).exp2()
    return scales.float()
