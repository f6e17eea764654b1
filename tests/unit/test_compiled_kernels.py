"""Every Triton kernel of ours compiles for real GPUs, at real sizes, into what they have room for: without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.liger, pytest.mark.timeout(600)]

LEAST_SHARED = 99 * 1024  # bytes of a program, of capability 8.6, 8.9 and 12.0
SPILLED = 128  # bytes of a thread: a few numbers


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    """For capability 9.0, as `tests.compiled` says them."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.compiled", "--few", "90"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_all_of_them_compile(kernels: list[dict[str, Any]]) -> None:
    assert {kernel["name"] for kernel in kernels} == {
        *("_gate_tail", "_gate_tail_back", "_stream_sum", "_stream_back", "_sums", "_gradient"),
        *("_round_rows", "_across", "_product_of_blocks"),
    }


def test_none_takes_more_of_a_gpu_than_it_has(kernels: list[dict[str, Any]]) -> None:
    assert not [kernel for kernel in kernels if kernel["spilled"] > SPILLED or kernel["shared"] > LEAST_SHARED]


def test_float32_is_not_multiplied_as_tf32(kernels: list[dict[str, Any]]) -> None:
    assert not [kernel for kernel in kernels if "tf32" in kernel["has"]]


def test_codes_are_divided_exactly_and_rounded_by_the_gpu(kernels: list[dict[str, Any]]) -> None:
    """A fast division is not exact, of powers of two neither."""
    of_codes = [kernel for kernel in kernels if kernel["name"] in ("_round_rows", "_across")]
    assert not [kernel for kernel in of_codes if "div." in kernel["has"]]
    rounding = [kernel["name"] for kernel in of_codes if "cvt.rn.satfinite.e4m3x2.f32" in kernel["has"]]
    assert set(rounding) == {"_round_rows", "_across"}
