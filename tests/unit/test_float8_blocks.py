"""The Triton kernel of products by matrices with a scale for each block: what it computes, and that it compiles."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from meshlora.wings.quantized import float8_gpu
from tests.float8_numbers import BLOCKS, blocks
from tests.tape import TapeRecorder

assert float8_gpu  # it has the operator


def _assert_is_the_product(found: Tensor, given: tuple[Tensor, ...], step: int, bias: Tensor | None) -> None:
    """To the rounding of sums in float32, number by number, against float64."""
    rows, of_rows, codes, scales, _ = (each.double() for each in given)
    n, k = (torch.arange(size) // step for size in codes.shape)
    numbers, x = codes * scales[n][:, k], rows * of_rows
    wanted, most = x @ numbers.T, x.abs() @ numbers.abs().T
    if bias is not None:
        wanted, most = wanted + bias.double(), most + bias.double().abs()
    assert ((found.double() - wanted).abs() <= (codes.shape[1] + 8) * 2.0**-24 * most).all()


@pytest.mark.liger
@pytest.mark.parametrize("shape", BLOCKS, ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_each_part_of_the_sum_has_the_scale_of_its_block(
    shape: tuple[int, int, int, int], is_transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshlora.wings.quantized import float8_block_kernels
    from tests.interpreted import as_torch_casts

    as_torch_casts(monkeypatch)
    given, step = blocks(*shape, is_transposed=is_transposed), shape[3]
    for bias in (None, given[-1]):
        out = torch.full(shape[:2], float("nan"))
        float8_block_kernels.write_blocks(out, *given[:4], step, bias)
        _assert_is_the_product(out, given, step, bias)


@pytest.mark.liger
def test_what_is_next_to_the_result_is_not_written() -> None:
    from meshlora.wings.quantized import float8_block_kernels

    given = blocks(7, 208, 80, 64, is_transposed=False)
    around = torch.full((9, 208), 3.0)
    float8_block_kernels.write_blocks(around[1:8], *given[:4], 64, None)
    assert (around[[0, 8]] == 3.0).all()


@pytest.mark.parametrize("shape", BLOCKS, ids=str)
def test_products_of_a_cpu_are_those_of_the_kernel(shape: tuple[int, int, int, int]) -> None:
    """And the operator is one of a record: the host reads nothing."""
    given, step = blocks(*shape, is_transposed=True), shape[3]
    out = torch.empty(shape[:2])
    replay = TapeRecorder().record(lambda: torch.ops.meshlora.write_blocks(out, *given[:4], step, given[-1]))
    out.fill_(float("nan"))
    replay()
    _assert_is_the_product(out, given, step, given[-1])


# Compiled as on a GPU, which the interpreter is not: it takes what the compiler refuses.
_COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from meshlora.wings.quantized.float8_block_kernels import _product_of_blocks

CODES, NUMBERS, SIZES = ("rows", "codes"), ("of_rows", "scales"), ("num_rows", "height", "width", "down", "across")
for dtype in ("bf16", "fp16", "fp32"):
    signature = dict.fromkeys(("bias", "out"), "*" + dtype) | dict.fromkeys(CODES, "*fp8e4nv")
    signature |= dict.fromkeys(NUMBERS, "*fp32") | dict.fromkeys(SIZES, "i32")
    names = [_product_of_blocks.arg_names.index(name) for name in ("height", "width", *CODES)]
    of_16 = {(number,): [["tt.divisibility", 16]] for number in names}
    for step in (128, 64, 32):
        constants = {"STEP": step, "HAS": True}
        source = ASTSource(_product_of_blocks, signature | dict.fromkeys(constants, "constexpr"), constants, of_16)
        for capability, product in ((89, "mma.sync.aligned.m16n8k32"), (90, "wgmma.mma_async")):
            options = {"num_warps": 4, "num_stages": 3}
            made = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            lines = [line for line in made.asm["ptx"].splitlines() if product in line]
            assert lines and all("e4m3.e4m3" in line for line in lines), (capability, step, lines)
            assert "cp.async" in made.asm["ptx"]
            assert made.metadata.shared <= 99 * 1024, made.metadata.shared
"""


@pytest.mark.liger
def test_the_kernel_compiles_into_products_of_float8() -> None:
    code = f"import os; del os.environ['TRITON_INTERPRET']; {_COMPILE.strip()}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
