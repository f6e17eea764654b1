"""Our Triton kernels, compiled for GPUs that are not here as a run with real sizes has them compiled:

    python -m tests.compiled [--few] [CAPABILITY ...]     # 80 90 100, say: what each kernel takes of that GPU

The functions that launch kernels are called with tensors without memory, and Triton compiles for what they are given:
their dtypes, strides and alignments decide about the code. No kernel is launched. Not in a process that interprets.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from meshlora.wings.kernels import loss_kernels, stream_kernels, tail_kernels, tails
from meshlora.wings.quantized import float8_kernels
from meshlora.wings.quantized.float8_block_kernels import write_blocks
from meshlora.wings.quantized.kinds import FLOAT8_BLOCK

SCALE, EPS = 0.7, 1e-5
WORDS = ("tf32", "div.", "cvt.rn.satfinite.e4m3x2.f32")


@dataclass(frozen=True)
class Compiled:
    """A kernel. spilled: bytes of a thread's stack, in slow memory. shared: bytes of a program. asynchronous: copies to
    shared memory that a loop begins before it needs them. has: words of `WORDS` in its code."""

    name: str
    capability: int
    case: str
    registers: int
    spilled: int
    shared: int
    asynchronous: int
    has: list[str]


@dataclass(frozen=True)
class Case:
    """tokens: T. width, inner, vocab: H, F, V. ranks: of gate, up and down. is_float8: has products in float8, too."""

    name: str
    dtype: torch.dtype
    tokens: int
    width: int
    inner: int
    vocab: int
    ranks: tuple[int, int, int] = (16, 16, 16)
    is_float8: bool = False

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = (
    Case("8b", BF16, 4096, 4096, 14336, 128256, is_float8=True),
    Case("1b, 4 rows", BF16, 16384, 2048, 8192, 128256, is_float8=True),
    Case("8b, 32k, r=32", BF16, 32768, 4096, 14336, 128256, (32, 32, 32)),
    Case("70b", BF16, 4096, 8192, 28672, 128256, is_float8=True),
    Case("mixture", BF16, 4096, 2048, 768, 151936),
    Case("8b, float16, r=8", FP16, 4096, 4096, 14336, 128256, (8, 8, 8)),
    Case("8b, float32, r=32", FP32, 4096, 4096, 14336, 128256, (32, 32, 32)),
    Case("odd", BF16, 37, 150, 333, 1001, (3, 5, 4)),
    Case("one", BF16, 1, 96, 1, 1, (1, 1, 1)),
)
FEW = ("8b", "8b, float32, r=32", "odd")


class _Driver:
    """Says for which GPU to compile."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # kernels are kept by device

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def launches(case: Case) -> Iterator[Callable[[], object]]:
    """What a step of `case` launches."""
    yield from _of_tails(case)
    yield from _of_stream(case)
    yield from _of_loss(case)
    if case.is_float8:
        yield from _of_float8(case)


def _of_tails(case: Case) -> Iterator[Callable[[], object]]:
    empty, (of_gate, of_up, of_down) = case.empty, case.ranks
    gate, up = empty(case.tokens, case.inner), empty(case.tokens, case.inner)
    dz, columns = empty(case.tokens, of_down), tails.columns_of(gate)
    zs = empty(case.tokens, of_gate + of_up).split([of_gate, of_up], 1)  # one product for both
    for is_transposed in (False, True):  # as copies of factors lie: see `layers.rounded`
        bs = [empty(r, case.inner).mT if is_transposed else empty(case.inner, r) for r in (of_gate, of_up)]
        factors = *zs, *bs, empty(of_down, case.inner)
        yield lambda given=factors: tail_kernels.gate_tail(gate, up, *given, SCALE, columns=columns)
        found = tails._back_shapes(gate, gate, up, *factors)[2:]
        yield lambda given=factors, found=found: tail_kernels.gate_tail_back(
            gate, gate, up, *given, dz, SCALE, *found, columns=columns
        )


def _of_stream(case: Case) -> Iterator[Callable[[], object]]:
    empty, rank = case.empty, case.ranks[2]
    whole, weight, z, r = (
        empty(case.tokens, case.width),
        empty(case.width),
        empty(case.tokens, rank),
        empty(case.tokens, dtype=FP32),
    )
    for b in (empty(case.width, rank), empty(rank, case.width).mT):
        yield lambda b=b: stream_kernels.stream_sum(whole, z, b, whole, weight, EPS, whole, whole, r)
        for passed in (None, whole):
            yield lambda b=b, passed=passed: stream_kernels.stream_back(
                whole, passed, whole, weight, r, b, SCALE, whole, z
            )


def _of_loss(case: Case) -> Iterator[Callable[[], object]]:
    chunk = min(case.tokens, 1024)
    logits = case.empty(chunk, case.vocab)
    sums = case.empty(4, case.tokens, dtype=FP32)[:, :chunk]
    place, is_here = case.empty(chunk, 1, dtype=torch.int64), case.empty(chunk, dtype=torch.bool)
    yield lambda: loss_kernels.chunk_sums(sums, logits, case.vocab, place, is_here)
    yield lambda: loss_kernels.chunk_gradient(logits, sums, case.vocab, place, is_here)


def _of_float8(case: Case) -> Iterator[Callable[[], object]]:
    scale = case.empty(case.inner, 1, dtype=FP32)
    for width, factor in itertools.product((case.width, case.inner), (None, scale)):
        x = case.empty(case.tokens, width)
        yield lambda x=x, factor=factor: float8_kernels.round_rows(x, factor)
    for dtype in (torch.uint8, case.dtype):
        codes = case.empty(case.inner, case.width, dtype=dtype)
        yield lambda codes=codes: float8_kernels.codes_across(codes, scale)
    codes, rows = (case.empty(size, case.width, dtype=torch.float8_e4m3fn) for size in (case.inner, case.tokens))
    out, of_rows = case.empty(case.tokens, case.inner), case.empty(case.tokens, 1, dtype=FP32)
    down, across = (-(-size // FLOAT8_BLOCK) for size in codes.shape)
    for scales in (case.empty(down, across, dtype=FP32), case.empty(across, down, dtype=FP32).T):
        yield lambda scales=scales: write_blocks(out, rows, of_rows, codes, scales, FLOAT8_BLOCK, None)


def compiled(case: Case, capability: int) -> list[Compiled]:
    """Each kernel of `case`, for GPUs of `capability`.

    Raises:
        Exception: one does not compile.
    """
    found: dict[int, Compiled] = {}
    compile_only = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = compile_only(kernel, *args, grid=grid, warmup=True, **options)
        if id(made) not in found:
            found[id(made)] = _measured(kernel.fn.__name__, made, case, capability)
        return made

    driver.set_active(_Driver(capability))
    JITFunction.run = run
    try:
        for launch in launches(case):
            if capability >= 89 or "_of_float8" not in launch.__qualname__:
                launch()
    finally:
        JITFunction.run = compile_only
    return list(found.values())


def _measured(name: str, made: Any, case: Case, capability: int) -> Compiled:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK"))
    ptx = made.asm["ptx"]
    number = ptx.count("cp.async.cg") + ptx.count("cp.async.ca")
    has = [word for word in WORDS if word in ptx]
    return Compiled(name, capability, case.name, registers, stack, made.metadata.shared, number, has)


def main(*words: str) -> None:
    for capability in [int(word) for word in words if word != "--few"] or [80, 90, 100]:
        for case in CASES:
            if case.name in FEW or "--few" not in words:
                for one in compiled(case, capability):
                    print(json.dumps(asdict(one)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
