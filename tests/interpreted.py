"""liger-kernel on CPU tensors, by the interpreter of Triton. Imported only where both are installed; the interpreter is
asked for by TRITON_INTERPRET=1 in the environment of the process, as `tests/conftest.py` sets it.

The interpreter lacks numbers as tensors, and two functions of a GPU's library, which stand here. It computes bfloat16
wrongly: what runs is float32 and float16. It rounds to float8 wrongly, too: torch does in its place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from meshlora.wings.kernels.liger import Kernels, liger


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _rsqrt(x):  # type: ignore[no-untyped-def]
    return 1.0 / tl.sqrt(x)


def interpreted(patch: pytest.MonkeyPatch) -> Kernels:
    """The kernels of the installed liger-kernel, run by the interpreter for as long as `patch` holds."""
    converted = interpreter._implicit_cvt

    def with_numbers(given: Any) -> Any:
        if type(given) is not float:
            return converted(given)
        return tl.tensor(interpreter.TensorHandle(np.array([given], dtype=np.float32), tl.float32), tl.float32)

    patch.setattr(interpreter, "_implicit_cvt", with_numbers)
    kernels = liger()
    from liger_kernel.ops import geglu, rms_norm

    patch.setattr(geglu, "tanh", _tanh)
    patch.setattr(rms_norm, "rsqrt", _rsqrt)
    return kernels


def as_torch_casts(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter cast float32 to e4m3 as a GPU does, to the nearest and ties to even, while `patch` holds."""
    convert = interpreter._convert_float

    def cast(given: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(given, source, target, rounding)
        # A GPU's cast saturates, which that of torch does not: a code of what is not NaN is none.
        numbers = torch.from_numpy(np.ascontiguousarray(given)).clamp(-448.0, 448.0)
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    patch.setattr(interpreter, "_convert_float", cast)
