"""4-bit numbers (e2m1) in bytes along the inputs. NVFP4: a float8 scale for each 16 of them, and a float32 factor for
the matrix. MXFP4 of DeepSeek-V4: a power of two for each 32.

Owns: the names and shapes of their tensors, what of them is refused, and a slice, packed or plain. Does not own: other
formats, as gpt-oss' stacks (`wings.quantized.packed`), the arithmetic (`wings.quantized.quantized`).

compressed-tensors stores a factor that scales are divided by, modelopt its reciprocal, by which they are multiplied:
1 / x rounds, so that neither is made of the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshlora.model.stored import Bounds, Place, Reader
from meshlora.plan.rules import Packing
from meshlora.wings.quantized.kinds import FACTOR_BYTES, MX_BLOCK, NV_BLOCK, PACKINGS, Tensors, Touched
from meshlora.wings.quantized.quantized import Form, Packed, with_factors
from meshlora_ground.errors import UnsupportedError

# End of the name of a factor -> whether scales are divided by it.
_DIVIDES = {"_global_scale": True, "_scale_2": False}
_WAY_OUT = "use the checkpoint that it was made from"


def place_of_nvfp4(key: str, tensors: Mapping[str, Tensors], spent: list[str]) -> Place | None:
    """The place of the weight whose codes are at `key`; None if it is not NVFP4.

    Raises:
        UnsupportedError: with zero points; in the order of an engine.
    """
    name = key.removesuffix("_packed")
    for end, divides in _DIVIDES.items():
        if f"{name}{end}" in tensors:
            if f"{name}_zero_point" in tensors:
                raise UnsupportedError(f"{name}_zero_point", "asymmetric NVFP4 is not read", _WAY_OUT)
            parts = {"codes": key, "scales": f"{name}_scale", "factor": f"{name}{end}"}
            form = None
            if parts["scales"] in tensors:
                form = _form({part: tensors[own] for part, own in parts.items()}, parts["scales"], divides)
            return name, form, parts, spent
    return None


def place_of_mxfp4(key: str, tensors: Mapping[str, Tensors]) -> Place:
    """The place of the matrix of an expert whose codes, two a byte of I8, are at `key`."""
    parts = {"codes": key}
    for scales in (f"{key.rpartition('.')[0]}.scale", f"{key}_scale_inv"):
        if scales in tensors:
            parts["scales"] = scales
    form, codes = None, tensors[key].shape
    if "scales" in parts and len(codes) == 2:
        scales_of = tensors[parts["scales"]]
        if scales_of.shape == (codes[0], 2 * codes[1] / MX_BLOCK) and scales_of.dtype in ("F8_E8M0", "U8"):
            form = Fp4((codes[0], 2 * codes[1]), "mxfp4")
    return key, form, parts, []


def _form(parts: Mapping[str, Tensors], key: str, divides: bool) -> Fp4 | None:
    codes, scales, factor = parts["codes"], parts["scales"], parts["factor"]
    if codes.dtype == "U8" and (len(scales.shape) == 1 < math.prod(scales.shape) or scales.dtype == "U8"):
        rule = "scales in the order of TensorRT's kernels are not read, nor are those of bytes"
        raise UnsupportedError(f"{key}: {scales.dtype} {list(scales.shape)}", rule, _WAY_OUT)
    if (codes.dtype, scales.dtype, factor.dtype) != ("U8", "F8_E4M3", "F32") or len(codes.shape) not in (2, 3):
        return None
    *experts, rows, width = codes.shape
    needed = (*experts, rows, 2 * width / NV_BLOCK)
    padded = (*experts, -(-rows // 128) * 128, -(-2 * width // NV_BLOCK // 4) * 4)
    if scales.shape != needed and scales.shape == padded:
        rule = "scales in the order of an engine's kernels (128 rows, 4 blocks) are not read"
        raise UnsupportedError(f"{key}: {list(scales.shape)} for {list(needed)}", rule, _WAY_OUT)
    number = math.prod(factor.shape)
    if scales.shape != needed or factor.shape[:1] != (number,)[: len(factor.shape)] or number not in (1, *experts):
        return None
    return Fp4((*experts, rows, 2 * width), "nvfp4", divides, number)


@dataclass(frozen=True)
class Fp4:
    """A matrix, or a stack `[E, out, in]` of them; two codes a byte, the low half first.

    Attributes:
        divides: whether scales are divided by the factor, or multiplied. factors: 1, or one for each expert.
    """

    shape: tuple[int, ...]
    kind: str
    divides: bool = False
    factors: int = 1

    @property
    def packing(self) -> Packing:
        """How codes and scales stay packed in memory."""
        return PACKINGS[self.kind]

    def read(self, bounds: Bounds, read: Reader) -> Tensor:
        """The slice `bounds` of the weight, in float32."""
        *others, (start, stop) = bounds
        first = start // 2 * 2
        whole = self.keep([*others, (first, -(-stop // 2) * 2)], read).whole()
        return whole[..., start - first : stop - first]

    def keep(self, bounds: Bounds, read: Reader) -> Packed:
        """The slice `bounds` of the weight, packed. Columns are cut between bytes."""
        *experts, rows, (start, stop) = bounds
        assert start % 2 == 0 == stop % 2, bounds
        along = Touched.by(start, stop, self.packing.block[1])
        codes = read("codes", [*experts, rows, (start // 2, stop // 2)]).contiguous().view(torch.uint8)
        scales = read("scales", [*experts, rows, (along.first, along.last)])
        of_rows = (1,) * (rows[1] - rows[0])
        form = Form(self.kind, torch.float32, of_rows, along.counts, divides=self.divides)
        if self.kind not in FACTOR_BYTES:
            return Packed(codes, scales.contiguous().view(torch.uint8), form)
        of_experts = (0, 1)
        if self.factors > 1:
            (of_experts,) = experts
        factors = read("factor", [of_experts, (0, 1), (0, 1)]).flatten()
        if not experts:
            factors = factors[0]
        factors = factors.unsqueeze(-1).expand(scales.shape[:-1])
        return Packed(codes, with_factors(scales, factors), form)
