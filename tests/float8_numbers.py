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


def codes(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """`[N, K]`, bytes, all numbers of e4m3, and the scales of the rows, all one."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 254, shape, generator=generator)
    return (drawn + (drawn >= 127)).to(torch.uint8), torch.full((shape[0], 1), 2.0**-11)  # 127, 255: NaN
