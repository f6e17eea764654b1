"""NVFP4: 4-bit numbers (e2m1), a float8 scale for each 16 inputs, and a float32 factor for the matrix.

Owns: the names and shapes of its tensors, what of them is refused, and a slice, packed or plain. Does not own: other
formats (`wings.quantized.packed`), the arithmetic (`wings.quantized.quantized`).

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
from meshlora.wings.quantized.kinds import NV_BLOCK, Tensors, Touched
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


def _form(parts: Mapping[str, Tensors], key: str, divides: bool) -> Nvfp4 | None:
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
    return Nvfp4((*experts, rows, 2 * width), divides, number)


@dataclass(frozen=True)
class Nvfp4:
    """A matrix, or a stack `[E, out, in]` of them; two codes a byte, the low half first.

    Attributes:
        divides: whether scales are divided by the factor, or multiplied. factors: 1, or one for each expert.
    """

    shape: tuple[int, ...]
    divides: bool
    factors: int = 1
    packing = Packing("nvfp4", (1, NV_BLOCK), 1)

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
        along = Touched.by(start, stop, NV_BLOCK)
        codes = read("codes", [*experts, rows, (start // 2, stop // 2)]).contiguous()
        scales = read("scales", [*experts, rows, (along.first, along.last)])
        of_experts = (0, 1)
        if self.factors > 1:
            (of_experts,) = experts
        factors = read("factor", [of_experts, (0, 1), (0, 1)]).flatten()
        if not experts:
            factors = factors[0]
        factors = factors.unsqueeze(-1).expand(scales.shape[:-1])
        form = Form("nvfp4", torch.float32, (1,) * (rows[1] - rows[0]), along.counts, divides=self.divides)
        return Packed(codes, with_factors(scales, factors), form)
