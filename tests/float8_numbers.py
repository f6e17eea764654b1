"""Numbers on which kernels of float8 are held to their definition, on GPUs and by the interpreter of Triton."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTHS = (32, 576, 4096, 14336)
SHAPES = ((96, 200), (64, 64), (16, 4096), (14336, 32))
FACTOR = torch.full((8, 1), 2.0**-7)


def rows(width: int) -> Tensor:
    """`[T, width]`, float32: a row for each binade, with an outlier, of one number, of zeros, of ties."""
    generator = torch.Generator().manual_seed(width)
    binades = torch.arange(-149, 124)
    x = torch.randn(len(binades), width, generator=generator, dtype=torch.float64)
    x *= torch.exp2(binades.double())[:, None]
    x[3], x[150, 5], x[151, 1:], x[160] = 0.0, 1e6, 0.0, 448.0
    # Halfway between numbers of e4m3, where the scale is one.
    x[161], x[161, 0] = (2 * torch.arange(width) + 17) % 32 + 32, 448.0
    return x.clamp(-3e38, 3e38).float()


# T, N, K and the side of the squares of W that share a scale: whole and partial ones, of rows, of outputs, of the sum.
BLOCKS = (
    (64, 128, 128, 128),
    (1, 16, 272, 128),
    (65, 272, 16, 128),
    (130, 400, 336, 128),
    (7, 208, 80, 64),
    (63, 112, 208, 32),
)


def blocks(
    tokens: int, height: int, width: int, step: int, *, is_transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes `[T, K]` and scales `[T, 1]` of rows, codes `[N, K]` of W and the scales of its squares, which are any
    numbers, and a bias. is_transposed: the scales lie as those of W^T do."""
    generator = torch.Generator().manual_seed(tokens)
    of_rows = torch.randint(-9, 9, (tokens, 1), generator=generator).float().exp2()
    grid = [-(-size // step) for size in (height, width)]
    scales = torch.rand(grid[::-1] if is_transposed else grid, generator=generator) * 0.01 + 0.001
    given, of_matrix = (codes((size, width))[0].view(torch.float8_e4m3fn) for size in (tokens, height))
    bias = torch.randn(height, generator=generator)
    return given, of_rows, of_matrix, scales.T if is_transposed else scales, bias


def codes(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """`[N, K]`, bytes, all numbers of e4m3, and the scales of the rows, all one."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 254, shape, generator=generator)
    return (drawn + (drawn >= 127)).to(torch.uint8), torch.full((shape[0], 1), 2.0**-11)  # 127, 255: NaN
