"""Memory of routed experts in few bits: bytes held, and the peak of a forward and a backward, against bfloat16.

    python benchmarks/quantized_memory.py [--experts E] [--hidden H] [--inner I] [--tokens T] [--quick] [--json FILE]

The experts of one layer with LoRA on both projections, bfloat16, one thread; the default widths are those of gpt-oss.
Each measurement is a fresh process. Its peak is the high-water mark of its resident memory above the level before the
forward, where weights and tokens are there already; what the same run needs with plain weights, activations and
gradients, is subtracted. What remains must be less than the plain numbers of one expert. malloc is told to give back
what is freed (`M_MMAP_THRESHOLD`): left to itself it keeps freed pages below 32 MiB, of which a matrix of gpt-oss is
just one, and the peak would have some of its own in it, 0.3 to 0.8 experts. Nothing is printed unless the packed
experts compute the very numbers of their unpacked ones.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.layers.frozen import unpacked
from meshlora.wings.experts.products import Projection, backward_rows, forward_rows
from meshlora.wings.experts.row_counts import RowCounts
from meshlora.wings.quantized.quantized import Packed, pack, stacked
from processes import begin_high_water_mark, memory_bytes
from table import Findings, Parity, ParityError, Row, parser, run, smaller

KINDS = (None, "mxfp4", "nf4", "fp8", "int8")
RANK = 8
_M_MMAP_THRESHOLD = -3  # of mallopt(3)


@dataclass(frozen=True)
class Shape:
    """Experts of one layer, and the tokens of each."""

    experts: int
    hidden: int
    inner: int
    tokens: int

    @property
    def expert_bytes(self) -> int:
        """Of one expert, both projections, in bfloat16."""
        return 3 * self.hidden * self.inner * 2


@dataclass(frozen=True)
class Measured:
    """held_bytes: of the weights. peak_bytes: beyond them, of a forward and a backward. difference: from the numbers
    of the unpacked weights."""

    held_bytes: int
    peak_bytes: int
    difference: float


def weights(shape: Shape, kind: str | None) -> list[Tensor | Packed]:
    """Gate and up `[E, 2I, H]`, down `[E, H, I]`, made and packed one expert at a time."""
    found: list[Tensor | Packed] = []
    for out, inside in ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)):
        generator, each = torch.Generator().manual_seed(out), []
        for _ in range(shape.experts):
            matrix = torch.randn(out, inside, generator=generator).mul_(inside**-0.5).bfloat16()
            each.append(pack(matrix, kind) if kind else matrix)
        found.append(stacked(each) if kind else torch.stack(each))  # type: ignore[arg-type]
    return found


def step(held: list[Tensor | Packed], x: Tensor, shape: Shape) -> list[Tensor]:
    """The output and all gradients of `gate(x W1) W2` with factors on both, the gradient being the output itself."""
    counts = RowCounts.known([shape.tokens] * shape.experts, "cpu")
    generator = torch.Generator().manual_seed(1)
    first, second = (Projection(weight) for weight in held)
    factors = [
        torch.randn(shape.experts, *size, generator=generator).bfloat16() * 0.01
        for size in ((RANK, shape.hidden), (2 * shape.inner, RANK), (RANK, shape.inner), (shape.hidden, RANK))
    ]
    up, zt1 = forward_rows(x, first, counts, *factors[:2])
    gate, value = up.chunk(2, -1)
    inner = F.silu(gate) * value
    y, zt2 = forward_rows(inner, second, counts, *factors[2:])
    d_inner, da2, db2 = backward_rows(y, inner, zt2, second, counts, *factors[2:])
    assert d_inner is not None
    dx, da1, db1 = backward_rows(torch.cat([d_inner, d_inner], -1), x, zt1, first, counts, *factors[:2])
    return [one for one in (y, dx, da1, db1, da2, db2) if one is not None]


def measure_here(shape: Shape, kind: str | None) -> Measured:
    """One forward and backward in this process, which has run nothing of the size before."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)  # what is freed leaves the resident memory at once
    few = Shape(1, 128, 128, 4)
    step(weights(few, kind), torch.randn(4, 128).bfloat16(), few)
    held = weights(shape, kind)
    x = torch.randn(shape.experts * shape.tokens, shape.hidden, generator=torch.Generator().manual_seed(2)).bfloat16()
    level = begin_high_water_mark()  # what packing has freed would be used again, and hide what a step needs
    found = step(held, x, shape)
    peak = memory_bytes("VmHWM") - level
    num_bytes = sum(w.codes.nbytes + w.scales.nbytes if isinstance(w, Packed) else w.nbytes for w in held)
    expected = step([unpacked(weight) for weight in held], x, shape) if kind else found
    gaps = [float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, expected, strict=True)]
    return Measured(num_bytes, peak, max(gaps))


def measure(options: argparse.Namespace) -> Findings:
    """Each kind in turn, `repeats` times."""
    if options.quick:
        options.experts, options.repeats = min(options.experts, 4), 1
    if options.tiny:
        options.experts, options.hidden, options.inner, options.repeats = 2, 256, 256, 1
    shape = Shape(options.experts, options.hidden, options.inner, options.tokens)
    runs: dict[str | None, list[Measured]] = {kind: [] for kind in KINDS}
    for _ in range(options.repeats):
        for kind, found in runs.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found.append(pool.apply(measure_here, (shape, kind)))
    worst = max(one.difference for found in runs.values() for one in found)
    if worst > 0:
        raise ParityError("packed experts, against their unpacked ones", worst, 0.0)
    rows: list[Row] = []
    for kind in KINDS[1:]:
        names: dict[str, Any] = {"ours_name": str(kind), "unit": "MB"}
        pairs = list(zip(runs[kind], runs[None], strict=True))
        held = [[one.held_bytes / 1e6 for one in each] for each in zip(*pairs, strict=True)]
        extra = [max(0, ours.peak_bytes - plain.peak_bytes) / 1e6 for ours, plain in pairs]
        one = [shape.expert_bytes / 1e6] * len(pairs)
        few = {"target": 0.30} if kind in ("mxfp4", "nf4") else {"target": 0.55}
        what = f"{shape.experts} experts of {shape.hidden:,} × {shape.inner:,}"
        rows += [
            smaller(f"{what}, bytes held", *held, peer_name="bfloat16", **few, **names),
            smaller(f"{what}, peak beyond them", extra, one, peer_name="one expert", target=1.0, **names),
        ]
    details = {"shape": asdict(shape), "runs": {str(kind): [asdict(m) for m in found] for kind, found in runs.items()}}
    return Findings(Parity("output and gradients of packed experts", worst, 0.0, True), rows, details)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--experts", type=int, default=8)
    made.add_argument("--hidden", type=int, default=2880)
    made.add_argument("--inner", type=int, default=2880)
    made.add_argument("--tokens", type=int, default=16, help="of each expert")
    made.add_argument("--repeats", type=int, default=3, help="fresh processes per kind")
    options = made.parse_args()
    return run("Routed experts in few bits", options, measure, name="quantized_memory")


if __name__ == "__main__":
    sys.exit(main())
