"""Frozen matrices whose products are in float8: `model.compute: fp8`, and `fp8_backward`, whose forward is plain.

Owns: W^, made when a matrix is read, and its products. Does not own: the rounding (`wings.quantized.float8`), which
linears have them (`wings.quantized.kinds`), the product with an adapter (`layers.products`), kernels of GPUs
(`wings.quantized.float8_gpu`).

    W^     = each 128 x 128 block of the whole matrix, rounded with a power of two of its own
    y      = Q(x) W^^T          (fp8_backward: x W^T)
    dx     = Q(g) W^            the straight-through estimate: through the same W^ in both directions

Everything that is trained, and the path through the adapter, sees x and g as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from meshlora.wings.quantized import float8_gpu
from meshlora.wings.quantized.float8 import BIAS, exponents_of, nearest, power, round_tokens
from meshlora.wings.quantized.kinds import FLOAT8_BLOCK, Touched
from meshlora.wings.quantized.quantized import Form, Packed, in_blocks
from meshlora_ground.errors import UnsupportedError

# Of the norm of a block: what one scale of a matrix may change. Rounding to e4m3 changes 2.6e-2. Not a part of its
# numbers: of a matrix with outliers one in a hundred is below the normal range, and together they are 3e-5 of it.
MOST_CHANGED = 1e-3


@dataclass(frozen=True)
class Float8Form(Form):
    """How codes and scales are a matrix whose products are in float8. kind: float8 or float8_backward.

    step: of scales of blocks, on a GPU: these are all of as many rows and columns, but the last. 0: of rows.
    """

    step: int = 0

    @property
    def bits(self) -> int:
        """Of a code; where these are numbers, as if each were a byte."""
        return 8

    @property
    def holds_numbers(self) -> bool:
        """Whether the codes are the plain numbers."""
        return self.kind == "float8_backward"

    @functools.cached_property
    def is_of_kernels(self) -> bool:
        """Whether a matrix is as the kernels of a GPU take it: with one scale, told for each row. Cached: rows are
        thousands, and each product asks."""
        return len(self.columns) == 1 and set(self.rows) == {1}

    def matrix(self, codes: Tensor, scales: Tensor) -> Packed:
        """The matrix, which rounds what it is multiplied with."""
        # Blocks of a narrow matrix that is cut row by row look the same: their scales are bytes.
        of_kernels = scales.dtype == torch.float32 and self.is_of_kernels
        if self.holds_numbers:
            return Float8Backward(codes, scales, self, has_backward=of_kernels)
        return Float8(codes, scales, self, of_kernels, of_kernels)


class Float8(Packed):
    """W^, by which rounded inputs and rounded gradients are multiplied."""

    def entering(self, x: Tensor) -> Tensor:
        return round_tokens(x)

    def returning(self, g: Tensor) -> tuple[Tensor, Tensor]:
        return round_tokens(g), self.whole()

    def write_product(self, y: Tensor, x: Tensor, bias: Tensor | None) -> None:
        if not self.has_forward:
            super().write_product(y, x, bias)
            return
        float8_gpu.write_product(y, x, self.codes, self.scales, bias, step=_step(self))

        def definition(rows: Tensor) -> Tensor:
            return self.entering(rows).float() @ self.whole().float().T

        float8_gpu.check_once("forward", y, x, definition, bias)

    def gradient(self, g: Tensor) -> Tensor:
        return _gradient(self, g) if self.has_backward else super().gradient(g)


class Float8Backward(Packed):
    """W, by which inputs are multiplied as they are, and its W^, by which rounded gradients are.

    codes: W itself. scales: the exponents of its blocks, of the whole matrix.
    """

    def whole(self) -> Tensor:
        return self.codes

    def returning(self, g: Tensor) -> tuple[Tensor, Tensor]:
        rounded = _codes(self.codes.float(), exponents_of_blocks(self.scales), self.form)
        form = dataclasses.replace(self.form, kind="float8")
        return round_tokens(g), Packed(rounded, self.scales, form).whole()

    def gradient(self, g: Tensor) -> Tensor:
        return _gradient(self, g) if self.has_backward else super().gradient(g)


def _gradient(matrix: Packed, g: Tensor) -> Tensor:
    """`g W^` by the kernels of a GPU, of a matrix that has their form."""
    found = float8_gpu.gradient(g, matrix.codes, matrix.scales, step=_step(matrix))

    def definition(rows: Tensor) -> Tensor:
        rounded, weight = matrix.returning(rows)
        return rounded.float() @ weight.float()

    float8_gpu.check_once("backward", found, g, definition)
    return found


def _step(matrix: Packed) -> int:
    assert isinstance(matrix.form, Float8Form), matrix.form
    return matrix.form.step


def pack_float8(weight: Tensor, kind: str) -> Packed:
    """`weight` `[out, in]` as codes of W^, or, for float8_backward, itself, with the exponents of its blocks."""
    exact = weight.float().contiguous()
    rows, columns = (Touched.by(0, size, FLOAT8_BLOCK).counts for size in exact.shape)
    scales = (exponents_of(in_blocks(exact).abs().amax((1, 3))) + BIAS).to(torch.uint8)
    form = Float8Form(kind, weight.dtype, rows, columns)
    codes = weight.contiguous() if form.holds_numbers else _codes(exact, exponents_of_blocks(scales), form)
    return form.matrix(codes, scales)


def for_kernels(packed: Packed, name: str) -> Packed:
    """`packed`, of a matrix `name`, as the kernels of a GPU take it.

    Raises:
        UnsupportedError: one scale changes some block of 128 x 128 by more than a thousandth.
    """
    found, changed = in_one_scale(packed)
    if not changed <= MOST_CHANGED:
        rule = f"its kernels take one scale a matrix, which changes a block of {name} by {changed:.1e} of its norm"
        raise UnsupportedError("model.compute on a GPU", f"{rule} (limit {MOST_CHANGED:.0e})", "leave it out")
    return found


@torch.no_grad()
def in_one_scale(packed: Packed) -> tuple[Packed, float]:
    """`packed` with one scale for the whole matrix, told for each row, which changes numbers below the normal range
    alone; and the largest change of a block of 128 x 128, of its norm."""
    assert isinstance(packed.form, Float8Form), packed.form
    height, width = packed.shape
    form = dataclasses.replace(packed.form, rows=(1,) * height, columns=(width,))
    exponent = exponents_of_blocks(packed.scales).max()
    scales = power(exponent, torch.float32).expand(height, 1).contiguous()
    blocks = dataclasses.replace(packed.form, kind="float8")
    rounded = packed.codes
    if form.holds_numbers:
        rounded = _codes(packed.codes.float(), exponents_of_blocks(packed.scales), blocks)
    exact = _numbers(rounded, packed.scales, blocks)
    with_one_scale = dataclasses.replace(form, kind="float8")
    codes = _codes(exact, exponent.expand(height, 1), with_one_scale)
    changed = _most_changed(_numbers(codes, scales, with_one_scale), exact)
    return form.matrix(packed.codes if form.holds_numbers else codes, scales), changed


def _numbers(codes: Tensor, scales: Tensor, form: Form) -> Tensor:
    """W^ `[out, in]` in float32."""
    return Packed(codes, scales, form).to(codes.device, torch.float32).whole()


def _most_changed(found: Tensor, exact: Tensor) -> float:
    """Of `[out, in]`: the largest change of a block, relative to its norm."""
    changes, norms = (in_blocks(each).square().sum((1, 3)) for each in (found - exact, exact))
    return (changes / norms.clamp(min=1e-30)).max().sqrt().item()


def matrix_like(height: int, width: int, kind: str, dtype: torch.dtype, *, device: str) -> Packed:
    """What `for_kernels` gives for a matrix `[height, width]`, of any values."""
    form = Float8Form(kind, dtype, (1,) * height, (width,))
    of_codes = dtype if form.holds_numbers else torch.uint8
    codes = torch.empty(height, width, dtype=of_codes, device=device)
    return form.matrix(codes, torch.empty(height, 1, dtype=torch.float32, device=device))


def exponents_of_blocks(scales: Tensor) -> Tensor:
    """Exponents of scales, which are bytes, or numbers in float32; int32."""
    if scales.dtype == torch.uint8:
        return scales.int() - BIAS
    return (scales.view(torch.int32) >> 23) - BIAS


def _codes(exact: Tensor, exponents: Tensor, form: Form) -> Tensor:
    """The codes `[out, in]`, uint8, of a float32 matrix whose blocks have these exponents."""
    down, across = (blocks_of(sizes, exact.device) for sizes in (form.rows, form.columns))
    each = exponents.index_select(0, down).index_select(1, across)
    return nearest(exact * power(-each, torch.float32)).to(torch.float8_e4m3fn).view(torch.uint8)


@functools.cache
def blocks_of(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The number of the block that each row, or column, is in. Kept: inside a record the host writes nothing."""
    return torch.arange(len(sizes), device=device).repeat_interleave(torch.tensor(sizes, device=device))
