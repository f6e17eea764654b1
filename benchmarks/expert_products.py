"""What LoRA on experts costs at the least: its six low-rank products per expert beside the two of the frozen base.

Only the products, into buffers that are there already, one expert after the other; no autograd, no model. What a
training step adds to the frozen base cannot be less as long as each product is a call of torch's matrix library.

    python benchmarks/expert_products.py [--tiny]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

RANK, TOP_K = 8, 4
# (experts, tokens), as in moe_vs_peft.py; (in, out) of gate_up and of down.
SHAPES = ((128, 256), (128, 1024), (32, 1024))
PROJECTIONS = ((512, 512), (256, 512))


@dataclass
class Expert:
    """One expert's rows, matrices and results."""

    weight: Tensor  # [in, out]
    a: Tensor  # [r, in]
    bt: Tensor  # [r, out]
    x: Tensor  # [n, in]
    g: Tensor  # [n, out]
    y: Tensor
    dx: Tensor
    zt: Tensor  # [r, n]
    dzt: Tensor
    da: Tensor
    dbt: Tensor


def experts(number: int, tokens: int) -> list[Expert]:
    """All experts of both projections, with equal shares of the rows."""
    rows = tokens * TOP_K // number
    found = []
    for inputs, outputs in PROJECTIONS:
        for _ in range(number):
            x, g = torch.randn(rows, inputs), torch.randn(rows, outputs)
            a, bt, zt = torch.randn(RANK, inputs), torch.randn(RANK, outputs), torch.empty(RANK, rows)
            y, dx = torch.empty_like(g), torch.empty_like(x)
            weight = torch.randn(inputs, outputs)
            found.append(Expert(weight, a, bt, x, g, y, dx, zt, zt.clone(), torch.empty_like(a), torch.empty_like(bt)))
    return found


def base(found: list[Expert]) -> None:
    """Forward, and the gradient of the input."""
    for e in found:
        torch.mm(e.x, e.weight, out=e.y)
    for e in found:
        torch.mm(e.g, e.weight.T, out=e.dx)


def lora(found: list[Expert]) -> None:
    """Two products forward, four backward."""
    for e in found:
        torch.mm(e.a, e.x.T, out=e.zt)
        e.y.addmm_(e.zt.T, e.bt)
    for e in found:
        torch.mm(e.bt, e.g.T, out=e.dzt)
        e.dx.addmm_(e.dzt.T, e.a)
        torch.mm(e.zt, e.g, out=e.dbt)
        torch.mm(e.dzt, e.x, out=e.da)


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="few experts: shows that it runs")
    shapes = ((4, 16),) if parser.parse_args().tiny else SHAPES
    torch.set_num_threads(1)
    for number, tokens in shapes:
        found, times = experts(number, tokens), []
        for _ in range(12):
            started = time.perf_counter()
            base(found)
            between = time.perf_counter()
            lora(found)
            times.append((between - started, time.perf_counter() - between))
        ratio = statistics.median(low / whole for whole, low in times[2:])
        work = sum(3 * RANK * (i + o) for i, o in PROJECTIONS) / sum(2 * i * o for i, o in PROJECTIONS)
        print(f"{number} experts x {tokens} tokens: LoRA {ratio:.3f} of the base's time, {work:.3f} of its work")


if __name__ == "__main__":
    main()
