"""The numbers of products in float8: what e4m3 makes of inputs, gradients and weights.

Owns: the rounding. Does not own: the matrices that have such products (`wings.quantized.float8_matrix`), those on GPUs
(`wings.quantized.float8_gpu`).

    e(S)   = ceil(log2(max|S| / 448)), at least -126                  448 is the largest e4m3: nothing saturates
    Q(x)   = 2^e R(x / 2^e), e of each 32 features of a token         R: to the nearest e4m3, ties to even

Why these, and why no cut crosses a block: docs/quantization.md, "Products in float8".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.wings.quantized.kinds import TOKEN_BLOCK

BIAS = 127  # of the bits of an exponent of float32
_LEAST = -126  # below, scales would be subnormal
# Bits of the mantissa, by the width of a number; e4m3 keeps three.
_MANTISSA = {torch.float32: (torch.int32, 23), torch.float64: (torch.int64, 52)}


def round_tokens(x: Tensor) -> Tensor:
    """Q(x), x `[T, K]`, each block of 32 features of a token with an exponent of its own; in the dtype of x."""
    wide = x if x.dtype in _MANTISSA else x.float()
    numbers, exponents = encoded(F.pad(wide, (0, -x.shape[1] % TOKEN_BLOCK)).unflatten(1, (-1, TOKEN_BLOCK)))
    return decoded(numbers, exponents).flatten(1)[:, : x.shape[1]].to(x.dtype)


def encoded(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 numbers, exponent) of each block `[..., 32]`."""
    exponents = exponents_of(blocks.abs().amax(-1, keepdim=True))
    return nearest(blocks * power(-exponents, blocks.dtype)), exponents


def decoded(numbers: Tensor, exponents: Tensor) -> Tensor:
    """The numbers of blocks times their scale."""
    return numbers * power(exponents, numbers.dtype)


def exponents_of(largest: Tensor) -> Tensor:
    """e of blocks whose largest absolute values are `largest`; int32, 0 of zeros."""
    # largest = m 2^k with m in [0.5, 1), and 448 = 0.875 * 2^9: exact, which a logarithm would not be.
    m, k = torch.frexp(largest)
    exponents = k - 9 + (m > 0.875).int()
    return torch.where(largest == 0, 0, exponents).clamp(_LEAST, BIAS).int()


def nearest(x: Tensor) -> Tensor:
    """The e4m3 number nearest to each x, ties to even; |x| at most 448. By integers, in one rounding from float64."""
    of_bits, mantissa = _MANTISSA[x.dtype]
    drop = mantissa - 3
    bits = x.view(of_bits)
    # Half of the last bit that stays, less one, and one more where that bit is odd: a tie goes to the even number.
    rounded = bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)
    normal = (rounded & -(1 << drop)).view(x.dtype)
    # Below 2^-6 the numbers are multiples of 2^-9: the last bit of a sum with this.
    magnet = 1.5 * 2.0 ** (mantissa - 9)
    subnormal = ((x + magnet) - magnet).copysign(x)  # of what becomes 0, too, as a cast has it
    return torch.where(x.abs() < 2.0**-6, subnormal, normal)


def power(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """2^e, exactly: exponents -127 ... 127, the least as that of a subnormal."""
    return ((exponents + BIAS).clamp(min=1) << 23).view(torch.float32).to(dtype)
