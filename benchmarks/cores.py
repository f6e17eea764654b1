"""What the cores of this machine can: the rate of a matrix product in float32 and in bfloat16, timed.

Owns: whether bfloat16 is worth measuring here, and how many times as slow as usual these cores are. Without units for
it a product in bfloat16 is many times as slow as in float32: nobody trains so, and a benchmark of it does not end.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch

USUAL_FLOPS = 30e9  # in float32, of one core with AVX-512
_SIZES = (256, 512, 512)  # less than a second also where bfloat16 is emulated
_REPEATS = 3


@functools.cache
def product_flops(dtype: torch.dtype) -> float:
    """FLOP/s of a product on one core; the best of a few."""
    m, k, n = _SIZES
    a, b = torch.ones(m, k, dtype=dtype), torch.ones(k, n, dtype=dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = []
    for _ in range(_REPEATS + 1):  # the first prepares the kernel
        started = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return 2 * m * k * n / min(seconds[1:])


def dtypes_here(dtypes: Sequence[str]) -> tuple[str, ...]:
    """`dtypes`, without bfloat16 where its products are slower than float32's."""
    has_units = product_flops(torch.bfloat16) >= product_flops(torch.float32)
    return tuple(dtype for dtype in dtypes if has_units or dtype != "bfloat16")


def fewer(number: int) -> int:
    """`number` of layers or tokens, or as much less as these cores are slower than usual; at least 1."""
    slowness = USUAL_FLOPS / product_flops(torch.float32)
    return number if slowness < 1.5 else max(1, round(number / slowness))


def describe() -> str:
    """Both rates, in words."""
    rates = [f"{product_flops(getattr(torch, name)) / 1e9:,.1f} in {name}" for name in ("float32", "bfloat16")]
    return f"GFLOP/s of a product on one core: {', '.join(rates)}"
