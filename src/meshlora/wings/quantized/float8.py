"""Products in float8 of a frozen base: `model.compute: fp8`, and `fp8_backward`, whose forward is plain.

Owns: the rounding of weights, inputs and output gradients, and the products of rounded numbers. Does not own: which
linears have them (`wings.quantized.kinds`), the product with an adapter (`layers.products`).

    e(S)   = ceil(log2(max|S| / 448)), at least -126                  448 is the largest e4m3: nothing saturates
    Q(x)   = 2^e R(x / 2^e), e of each 32 features of a token         R: to the nearest e4m3, ties to even
    W^     = the same of each 128 x 128 block of the whole matrix     once, when it is loaded
    y      = Q(x) W^^T          (fp8_backward: x W^T)
    dx     = Q(g) W^            the straight-through estimate: through the same W^ in both directions

Scales are powers of two: what a number is rounded to does not depend on them, unless it falls below the normal range of
its block. Blocks of 32 are of the whole matrix, and no cut crosses one: each rank rounds as one process does.
Everything that is trained, and the path through the adapter, sees x and g as they are.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.wings.quantized.kinds import FLOAT8_BLOCK, TOKEN_BLOCK, Touched
from meshlora.wings.quantized.quantized import Form, Packed

_LEAST, _BIAS = -126, 127  # of exponents of float32: below, numbers would be subnormal
# Bits of the mantissa, by the width of a number; e4m3 keeps three.
_MANTISSA = {torch.float32: (torch.int32, 23), torch.float64: (torch.int64, 52)}


@dataclass(frozen=True)
class Float8Form(Form):
    """How codes and scales are a matrix whose products are in float8. kind: float8 or float8_backward."""

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


class Float8Backward(Packed):
    """W, by which inputs are multiplied as they are, and its W^, by which rounded gradients are.

    codes: W itself. scales: the exponents of its blocks, of the whole matrix.
    """

    def whole(self) -> Tensor:
        return self.codes

    def returning(self, g: Tensor) -> tuple[Tensor, Tensor]:
        rounded = _codes(self.codes.float(), self.scales, self.form)
        form = dataclasses.replace(self.form, kind="float8")
        return round_tokens(g), Packed(rounded, self.scales, form).whole()


def round_tokens(x: Tensor) -> Tensor:
    """Q(x), x `[T, K]`, each block of 32 features of a token with an exponent of its own; in the dtype of x."""
    wide = x if x.dtype in _MANTISSA else x.float()
    numbers, exponents = encoded(F.pad(wide, (0, -x.shape[1] % TOKEN_BLOCK)).unflatten(1, (-1, TOKEN_BLOCK)))
    return decoded(numbers, exponents).flatten(1)[:, : x.shape[1]].to(x.dtype)


def encoded(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 numbers, exponent) of each block `[..., 32]`."""
    exponents = exponents_of(blocks.abs().amax(-1, keepdim=True))
    return _nearest(blocks * _power(-exponents, blocks.dtype)), exponents


def decoded(numbers: Tensor, exponents: Tensor) -> Tensor:
    """The numbers of blocks times their scale."""
    return numbers * _power(exponents, numbers.dtype)


def exponents_of(largest: Tensor) -> Tensor:
    """e of blocks whose largest absolute values are `largest`; int32, 0 of zeros."""
    # largest = m 2^k with m in [0.5, 1), and 448 = 0.875 * 2^9: exact, which a logarithm would not be.
    m, k = torch.frexp(largest)
    exponents = k - 9 + (m > 0.875).int()
    return torch.where(largest == 0, 0, exponents).clamp(_LEAST, _BIAS).int()


def pack_float8(weight: Tensor, kind: str) -> Packed:
    """`weight` `[out, in]` as codes of W^, or, for float8_backward, itself, with the exponents of its blocks."""
    exact = weight.float().contiguous()
    height, width = exact.shape
    rows, columns = (Touched.by(0, size, FLOAT8_BLOCK).counts for size in exact.shape)
    padded = F.pad(exact, (0, -width % FLOAT8_BLOCK, 0, -height % FLOAT8_BLOCK))  # of the last dim first
    blocks = padded.view(len(rows), FLOAT8_BLOCK, len(columns), FLOAT8_BLOCK)
    scales = (exponents_of(blocks.abs().amax((1, 3))) + _BIAS).to(torch.uint8)
    form = Float8Form(kind, weight.dtype, rows, columns)
    codes = weight.contiguous() if form.holds_numbers else _codes(exact, scales, form)
    return form.matrix(codes, scales)


def _codes(exact: Tensor, scales: Tensor, form: Form) -> Tensor:
    """The codes `[out, in]`, uint8, of a float32 matrix whose blocks have the exponents `scales`."""
    exponents = scales.int() - _BIAS
    down = torch.tensor(form.rows, device=exact.device)
    across = torch.tensor(form.columns, device=exact.device)
    each = exponents.repeat_interleave(down, 0).repeat_interleave(across, 1)
    return _nearest(exact * _power(-each, torch.float32)).to(torch.float8_e4m3fn).view(torch.uint8)


def _nearest(x: Tensor) -> Tensor:
    """The e4m3 number nearest to each x, ties to even; |x| at most 448. By integers, in one rounding from float64."""
    of_bits, mantissa = _MANTISSA[x.dtype]
    drop = mantissa - 3
    bits = x.view(of_bits)
    # Half of the last bit that stays, less one, and one more where that bit is odd: a tie goes to the even number.
    rounded = bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)
    normal = (rounded & -(1 << drop)).view(x.dtype)
    # Below 2^-6 the numbers are multiples of 2^-9: the last bit of a sum with this.
    magnet = 1.5 * 2.0 ** (mantissa - 9)
    subnormal = (x + magnet) - magnet
    return torch.where(x.abs() < 2.0**-6, subnormal, normal)


def _power(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """2^e, exactly: exponents -127 ... 127, the least as that of a subnormal."""
    return ((exponents + _BIAS).clamp(min=1) << 23).view(torch.float32).to(dtype)
