"""A quantised base: scales and blocks that are not those of the matrix."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from meshlora.common.compat import running_backward
from meshlora.layers import linear
from meshlora.layers.quantized import Packed
from meshlora.plan.quantization import BLOCK
from meshlora.verify.faults.fault import by_name, mutation


def _straddling(original: Any) -> Any:
    """Blocks begin in the midst of those that one process has."""
    return lambda weight, kind: original(weight.roll(BLOCK // 2, 1), kind)


def _rolled_back(original: Any) -> Any:
    return lambda self: original(self).roll(-(BLOCK // 2), 1)


def _rounded_in_backward(original: Any) -> Any:
    """The backward unpacks to bfloat16."""

    def whole(self: Packed) -> Tensor:
        found: Tensor = original(self)
        return found.bfloat16().to(found.dtype) if running_backward() >= 0 else found

    return whole


def _scale_of_neighbour(original: Any) -> Any:
    def pack(weight: Tensor, kind: str) -> Packed:
        packed: Packed = original(weight, kind)
        return dataclasses.replace(packed, absmax=packed.absmax.roll(1, 0))

    return pack


OF_QUANTIZATION = by_name(
    mutation(
        "quantized_blocks_straddle",
        "the blocks of a rank are blocks of the whole matrix",
        "quantized",
        (linear, "pack", _straddling),
        (Packed, "whole", _rolled_back),
    ),
    mutation(
        "quantized_scale_of_neighbour",
        "each block has its own scale",
        "quantized",
        (linear, "pack", _scale_of_neighbour),
    ),
    mutation(
        "quantized_otherwise_in_backward",
        "a backward computes with the numbers of its forward",
        "quantized digits",
        (Packed, "whole", _rounded_in_backward),
    ),
)
