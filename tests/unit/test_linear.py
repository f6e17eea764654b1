"""The LoRA linear as one autograd function: gradients, frozen weights, mixed precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshlora.layers.products import Entered, LoraLinearFunction
from meshlora.layers.tokens import Segment


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """One adapter on all rows, with the scale 0.5."""
    whole = [Segment(0, x.numel() // x.shape[-1], 0.5)]
    y: Tensor = LoraLinearFunction.apply(x, None, weight, bias, whole, Entered(x), a, b)
    return y


def _inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5), (7, 5), (7,), (2, 5), (7, 2))  # x, W, b, A, B
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def test_gradients_of_x_a_and_b_pass_gradcheck() -> None:
    x, weight, bias, a, b = _inputs()
    x, a, b = (t.requires_grad_() for t in (x, a, b))
    assert torch.autograd.gradcheck(lambda x, a, b: _apply(x, weight, bias, a, b), (x, a, b))


def test_forward_is_base_plus_scaled_update() -> None:
    x, weight, bias, a, b = _inputs()
    expected = F.linear(x, weight + 0.5 * b @ a, bias)
    assert torch.allclose(_apply(x, weight, bias, a, b), expected, rtol=1e-12)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 32, 33])
def test_few_and_many_tokens_have_the_same_formula(num_tokens: int, has_bias: bool) -> None:
    _, weight, bias, a, b = _inputs()
    x = torch.randn(1, num_tokens, 5, dtype=torch.float64, requires_grad=True)
    a, b = a.requires_grad_(), b.requires_grad_()
    y = _apply(x, weight, bias if has_bias else None, a, b)
    expected = F.linear(x, weight + 0.5 * b @ a, bias if has_bias else None)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    g = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(one, (x, a, b), g) for one in (y * 1, expected))
    for ours, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    y.mul_(2)  # some models do: no view, or autograd would refuse it


class _LargestProduct(TorchDispatchMode):
    """Counts matrix products whose result has W's shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = {shape, shape[::-1]}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if "mm" in func.name() and isinstance(result, Tensor) and tuple(result.shape) in self.shape:
            self.count += 1
        return result


def test_no_gradient_of_the_weight_is_ever_computed() -> None:
    x, weight, bias, a, b = _inputs()
    weight.requires_grad_()
    x, a, b = (t.requires_grad_() for t in (x, a, b))
    with _LargestProduct(tuple(weight.shape)) as products:
        _apply(x, weight, bias, a, b).sum().backward()
    assert weight.grad is None
    assert products.count == 0


def test_input_without_gradient_costs_no_product() -> None:
    x, weight, _, a, b = _inputs()
    a, b = a.requires_grad_(), b.requires_grad_()
    with _LargestProduct((6, 5)) as products:  # dx is [T, in] = [6, 5]
        _apply(x, weight, None, a, b).sum().backward()
    assert products.count == 0
    assert a.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_of_a_half_precision_base_get_fp32_gradients(dtype: torch.dtype) -> None:
    x, weight, bias, a, b = _inputs(torch.float32)
    a, b = a.requires_grad_(), b.requires_grad_()
    y = _apply(x.to(dtype), weight.to(dtype), bias.to(dtype), a, b)
    y.sum().backward()
    assert y.dtype == dtype
    assert a.grad is not None
    assert a.grad.dtype == torch.float32
