"""Triton kernels of products in float8, without a GPU: what they compute, by the interpreter, and that they compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshlora.wings.quantized.float8_gpu import _across_by_definition, _rounded_by_definition
from tests.float8_numbers import FACTOR, SHAPES, WIDTHS, codes, rows

pytestmark = pytest.mark.liger


@pytest.fixture(autouse=True)
def _casts(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.interpreted import as_torch_casts

    as_torch_casts(monkeypatch)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_rounded_as_the_definition_says(width: int) -> None:
    from meshlora.wings.quantized import float8_kernels

    x = rows(width)
    for factor in (None, FACTOR):
        found, wanted = float8_kernels.round_rows(x, factor), _rounded_by_definition(x, factor)
        assert torch.equal(found[1], wanted[1])
        assert torch.equal(_numbers(found[0]), _numbers(wanted[0]))


def test_infinity_and_nan_are_no_numbers_afterwards() -> None:
    from meshlora.wings.quantized import float8_kernels

    x = rows(64)
    x[1, 3], x[2, 4], x[3] = float("inf"), float("nan"), float("-inf")
    found, scales = float8_kernels.round_rows(x, None)
    is_nan = found.float().isnan()
    assert is_nan[1, 3]
    assert is_nan[2, 4]
    assert is_nan[3].all()
    assert not is_nan[4:].any()
    assert scales.isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_plain", [False, True])
def test_codes_lie_across_as_the_definition_says(shape: tuple[int, int], is_plain: bool) -> None:
    from meshlora.wings.quantized import float8_kernels

    given, scale = codes(shape)
    if is_plain:
        given = given.view(torch.float8_e4m3fn).float() * scale
    found = float8_kernels.codes_across(given, scale)
    assert found.is_contiguous()
    assert torch.equal(_numbers(found), _numbers(_across_by_definition(given, scale)))


def _numbers(x: Tensor) -> Tensor:
    """Their numbers are their bits, but that zero has a sign in some."""
    assert x.dtype == torch.float8_e4m3fn
    return x.float()
