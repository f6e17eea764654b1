"""Faults of products in float8: scales, what is rounded and what is not, and the two directions.

A scale is a power of two: another one changes a number only where it saturates, or falls below the normal range. What
shows is a number that is made with one scale and read with another.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from meshlora.layers import products
from meshlora.model import weights
from meshlora.verify.faults.fault import after, around, fault, passing
from meshlora.verify.features import Feature
from meshlora.wings.quantized import float8, float8_matrix, float8_stored
from meshlora.wings.quantized.float8_matrix import Float8, Float8Backward, pack_float8
from meshlora.wings.quantized.kinds import STORED
from meshlora.wings.quantized.quantized import Form, Packed


@after(weights, "read_packed", needs={Feature.FLOAT8_FORWARD})
def float8_weights_off_by_a_power(packed: Packed, *_: Any, **__: Any) -> Packed:
    """the scale of a block of weights is what its bits say"""
    scales = packed.scales.clone()
    scales[0, 0] += 1
    return dataclasses.replace(packed, scales=scales)


# A new list each time the fault is injected.
@fault(
    lambda wrong, decoded: lambda *given, before=[]: wrong(decoded, before, *given),  # of one injection
    float8,
    "decoded",
    needs={Feature.FLOAT8},
)
def float8_scale_of_last_call(original: Any, before: list[Tensor], numbers: Tensor, exponents: Tensor) -> Any:
    """a scale is that of the numbers themselves, not of those before"""
    last = before[0] if before and before[0].shape == exponents.shape else exponents
    before[:] = [exponents]
    return original(numbers, last)


@after(float8, "encoded", needs={Feature.FLOAT8})
def float8_largest_saturates(found: tuple[Tensor, Tensor], _: Tensor) -> tuple[Tensor, Tensor]:
    """the largest number of a block is below the largest of e4m3"""
    numbers, exponents = found
    return (2 * numbers).clamp(-448, 448), exponents - 1


@after(float8_matrix, "round_tokens", needs={Feature.FLOAT8})
def float8_with_two_bits_of_mantissa(_: Tensor, x: Tensor) -> Tensor:
    """numbers are e4m3, not e5m2"""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().ceil().exp2()
    return (x / scale * 2**15).to(torch.float8_e5m2).to(x.dtype) * scale / 2**15


def _rounded_by_rows(matrix: Tensor) -> Tensor:
    """By scales in float32, one a row."""
    scale = matrix.abs().amax(1, keepdim=True).clamp(min=1e-30) / 448
    return (matrix / scale).to(torch.float8_e4m3fn).to(matrix.dtype) * scale


@fault(
    lambda wrong, original: lambda self, g: wrong(original(self, g)),
    Float8,
    "returning",
    needs={Feature.FLOAT8},
    also=((Float8Backward, "returning", lambda original: lambda self, g: _by_rows(original(self, g))),),
)
def float8_other_scales_in_backward(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """a backward multiplies by the weights of the forward, rounded once for both"""
    return _by_rows(found)


def _by_rows(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    g, weight = found
    return g, _rounded_by_rows(weight)


@after(Float8Backward, "returning", needs={Feature.FLOAT8_BACKWARD, Feature.PLAIN_BASE})
def float8_backward_of_plain_weights(found: tuple[Tensor, Tensor], self: Packed, _: Tensor) -> tuple[Tensor, Tensor]:
    """the weights of a backward in float8 are rounded"""
    return found[0], self.whole()


@after(weights, "read_packed", needs={Feature.STORED_FLOAT8})
def float8_stored_rounded_again(packed: Packed, *_: Any, **__: Any) -> Packed:
    """weights that are stored in float8 are multiplied as they are"""
    if packed.form.kind not in STORED.values():  # experts, which are unpacked
        return packed
    again = pack_float8(packed.whole(), "float8")
    return float8_stored.multiplied_as_stored(_as_checkpoints_are(again), packed.form.kind)


def _as_checkpoints_are(packed: Packed) -> Packed:
    form = packed.form
    return Form("fp8", form.dtype, form.rows, form.columns).matrix(packed.codes, packed.scales)


@after(float8_stored.Stored, "returning", needs={Feature.STORED_FLOAT8})
def float8_stored_backward_of_neighbour(found: tuple[Tensor, Tensor], self: Packed, _: Tensor) -> tuple[Tensor, Tensor]:
    """a block has the scale that is stored for it in the backward, too"""
    scales = self.scales.flatten().roll(1).view_as(self.scales)
    return found[0], dataclasses.replace(self, scales=scales).whole()


@fault(
    lambda wrong, original: lambda self, g: wrong(original(self, g), g),
    Float8,
    "returning",
    needs={Feature.FLOAT8},
    also=((Float8Backward, "returning", lambda original: lambda self, g: (g, original(self, g)[1])),),
)
def float8_gradients_not_rounded(found: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor]:
    """the gradient of an output is rounded before its product with the weights"""
    return g, found[1]


@after(products._Group, "seen", needs={Feature.FLOAT8_FORWARD})
def float8_low_rank_path_rounded(rows: Tensor, *_: Any) -> Tensor:
    """the path through the adapter sees inputs as they are"""
    return float8.round_tokens(rows.flatten(0, -2)).view_as(rows)


float8_scale_of_neighbour = around(float8, "decoded", needs={Feature.FLOAT8})(
    passing("each block of a token has its own scale", exponents=lambda exponents: exponents.roll(1, -2))
)
