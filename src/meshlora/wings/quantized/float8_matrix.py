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
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.wings.quantized import float8_gpu
from meshlora.wings.quantized.float8 import BIAS, exponents_of, nearest, power, round_tokens
from meshlora.wings.quantized.kinds import FLOAT8_BLOCK, Touched
from meshlora.wings.quantized.quantized import Form, Packed
from meshlora_ground.errors import UnsupportedError

_MOST_CHANGED = 1e-4  # of the numbers of a matrix, by one scale in place of those of its blocks


@dataclass(frozen=True)
class Float8Form(Form):
    """How codes and scales are a matrix whose products are in float8. kind: float8 or float8_backward."""

    @property
    def bits(self) -> int:
        """Of a code; where these are numbers, as if each were a byte."""
        return 8

    @property
    def holds_numbers(self) -> bool:
        """Whether the codes are the plain numbers."""
        return self.kind == "float8_backward"

    def matrix(self, codes: Tensor, scales: Tensor) -> Packed:
        """The matrix, which rounds what it is multiplied with."""
        if self.holds_numbers:
            return Float8Backward(codes, scales, self)
        return Float8(codes, scales, self)


class Float8(Packed):
    """W^, by which rounded inputs and rounded gradients are multiplied."""

    def entering(self, x: Tensor) -> Tensor:
        return round_tokens(x)

    def returning(self, g: Tensor) -> tuple[Tensor, Tensor]:
        return round_tokens(g), self.whole()

    def write_product(self, y: Tensor, x: Tensor, bias: Tensor | None) -> bool:
        if not _is_of_kernels(self.form):
            return False
        float8_gpu.write_product(y, x, self.codes, self.scales, bias)
        float8_gpu.check_once("forward", y, lambda: _wide(self.entering(x)) @ _wide(self.whole()).T, bias)
        return True

    def new_gradient(self, g: Tensor) -> Tensor | None:
        return _new_gradient(self, g)


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

    def new_gradient(self, g: Tensor) -> Tensor | None:
        return _new_gradient(self, g)


def _new_gradient(matrix: Packed, g: Tensor) -> Tensor | None:
    """`g W^` by the kernels of a GPU, of a matrix that has their form."""
    if not _is_of_kernels(matrix.form):
        return None
    found = float8_gpu.gradient(g, matrix.codes, matrix.scales)

    def definition() -> Tensor:
        rounded, weight = matrix.returning(g)
        return _wide(rounded) @ _wide(weight)

    float8_gpu.check_once("backward", found, definition)
    return found


def _wide(x: Tensor) -> Tensor:
    return x.float()


def _is_of_kernels(form: Form) -> bool:
    """Whether a matrix is as the kernels of a GPU take it: with one scale, told for each row."""
    return len(form.columns) == 1 and form.rows[0] == 1 and len(set(form.rows)) == 1


def pack_float8(weight: Tensor, kind: str) -> Packed:
    """`weight` `[out, in]` as codes of W^, or, for float8_backward, itself, with the exponents of its blocks."""
    exact = weight.float().contiguous()
    height, width = exact.shape
    rows, columns = (Touched.by(0, size, FLOAT8_BLOCK).counts for size in exact.shape)
    padded = F.pad(exact, (0, -width % FLOAT8_BLOCK, 0, -height % FLOAT8_BLOCK))  # of the last dim first
    blocks = padded.view(len(rows), FLOAT8_BLOCK, len(columns), FLOAT8_BLOCK)
    scales = (exponents_of(blocks.abs().amax((1, 3))) + BIAS).to(torch.uint8)
    form = Float8Form(kind, weight.dtype, rows, columns)
    codes = weight.contiguous() if form.holds_numbers else _codes(exact, exponents_of_blocks(scales), form)
    return form.matrix(codes, scales)


@torch.no_grad()
def for_kernels(packed: Packed, name: str) -> Packed:
    """`packed`, of a matrix `name`, as the kernels of a GPU take it: with one scale for the whole matrix, told for each
    row, which changes numbers below the normal range alone.

    Raises:
        UnsupportedError: it changes more than one number in ten thousand.
    """
    assert isinstance(packed.form, Float8Form), packed.form
    height, width = packed.shape
    form = dataclasses.replace(packed.form, rows=(1,) * height, columns=(width,))
    exponent = exponents_of_blocks(packed.scales).max()
    scales = power(exponent, torch.float32).expand(height, 1).contiguous()
    if form.holds_numbers:
        return form.matrix(packed.codes, scales)
    exact = packed.to(packed.codes.device, torch.float32).whole()
    found = form.matrix(_codes(exact, exponent.expand(height, 1), form), scales)
    changed = (found.to(exact.device, torch.float32).whole() != exact).sum().item() / exact.numel()
    if changed > _MOST_CHANGED:
        rule = f"its kernels take one scale a matrix, which changes {changed:.1e} of the numbers of {name}"
        raise UnsupportedError("model.compute on a GPU", f"{rule} (limit {_MOST_CHANGED:.0e})", "leave it out")
    return found


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
    down = torch.tensor(form.rows, device=exact.device)
    across = torch.tensor(form.columns, device=exact.device)
    each = exponents.repeat_interleave(down, 0).repeat_interleave(across, 1)
    return nearest(exact * power(-each, torch.float32)).to(torch.float8_e4m3fn).view(torch.uint8)
