"""Products in float8: their numbers are those of torch's float8, each block has the scale of the whole matrix."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from meshlora.layers.frozen import FrozenMatrix, frozen_linear, gradient_of_input
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.rules import Packing
from meshlora.wings.quantized import float8_gpu
from meshlora.wings.quantized.float8 import exponents_of, round_tokens
from meshlora.wings.quantized.float8_matrix import for_kernels, pack_float8
from meshlora.wings.quantized.quantized import Packed, joined
from meshlora_ground.errors import UnsupportedError
from meshlora_judge import float8 as judge

_E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
_DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def _blocks(dtype: torch.dtype, *, tokens: int = 40, width: int = 80) -> Tensor:
    """Numbers of all sizes: an outlier, rows of tiny numbers, zeros, a last block that is not full."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    x *= torch.logspace(-12, 12, tokens, base=2.0, dtype=torch.float64)[:, None]
    x[3, 5], x[7], x[11, :32], x[13] = 1e6, 0.0, 0.0, x[13] * 2.0**-100
    return x.to(dtype)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_tokens_are_rounded_as_by_torch(dtype: torch.dtype) -> None:
    """Of each block of 32: torch's cast to float8, between the least power of two that saturates nothing."""
    x = _blocks(dtype)
    wanted = torch.empty_like(x)
    for token, start in itertools.product(range(len(x)), range(0, x.shape[1], 32)):
        block = x[token, start : start + 32].double()
        exponent = -126
        while block.abs().max() > 448 * 2.0**exponent:
            exponent += 1
        # By float32, in which a tie of float64 may be none: these numbers have none so near.
        codes = (block / 2.0**exponent).float().to(torch.float8_e4m3fn)
        wanted[token, start : start + 32] = (codes.double() * 2.0**exponent).to(dtype)
    found = round_tokens(x)
    assert found.dtype == dtype
    assert torch.equal(found, wanted)
    assert torch.equal(found.signbit(), wanted.signbit())
    assert torch.equal(round_tokens(found), found)
    assert not torch.equal(found, x)


def test_every_number_and_tie_goes_where_ieee_says() -> None:
    numbers = _E4M3.double()
    low, high = numbers[:-1], numbers[1:]
    middles = (low + high) / 2
    # The even code is the one with an even number; 448 fixes the scale at 1.
    even = torch.where(torch.arange(126) % 2 == 0, low, high)
    for given, wanted in ((numbers[:-1], numbers[:-1]), (middles, even), (middles * (1 + 1e-15), high)):
        for value, nearest in zip(given.tolist(), wanted.tolist(), strict=True):
            block = torch.zeros(1, 32, dtype=torch.float64)
            block[0, 0], block[0, 1], block[0, 2] = 448.0, value, -value
            assert round_tokens(block)[0, :3].tolist() == [448.0, nearest, -nearest], value


def test_exponent_is_the_least_by_which_nothing_saturates() -> None:
    largest = torch.tensor([0.0, 448.0, 448.0001, 447.9, 1.0, 0.875, 0.8751, 2.0**-140, 3e38], dtype=torch.float32)
    found = exponents_of(largest).tolist()
    assert found == [0, 0, 1, 0, -8, -9, -8, -126, 120]


def test_what_is_not_finite_stays_so() -> None:
    x = torch.ones(2, 64)
    x[0, 0], x[1, 40] = float("nan"), float("inf")
    found = round_tokens(x)
    assert not found[0, 0].isfinite()
    assert not found[1, 40].isfinite()
    assert found[0, 32:].isfinite().all()
    assert found[1, :32].isfinite().all()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_judge_has_the_same_numbers_by_another_way(dtype: torch.dtype) -> None:
    x, weight = _blocks(dtype), _weight(dtype)
    assert torch.equal(judge._of_tokens(x), round_tokens(x))
    assert torch.equal(judge._of_weight(weight), pack_float8(weight, "float8").whole())


def _weight(dtype: torch.dtype) -> Tensor:
    """`[300, 200]`, whose blocks of 128 differ in size."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(300, 200, generator=generator, dtype=torch.float64)
    weight[:128, 128:] *= 2.0**-9
    weight[256:, :128] *= 2.0**20
    return weight.to(dtype)


def test_parts_are_those_of_the_whole_matrix() -> None:
    """Where a cut crosses a block, both parts have the scale of the whole block."""
    weight = _weight(torch.float64)
    packed = pack_float8(weight, "float8")
    parts = []
    for start, stop in ((0, 96), (96, 160), (160, 300)):
        block = slice(start // 128 * 128, -(-stop // 128) * 128)
        own = pack_float8(weight[block], "float8")
        parts.append(own.part((start - block.start, stop - block.start), (0, 200)))
    assert torch.equal(joined(parts, -2).whole(), packed.whole())


def test_both_directions_multiply_by_the_same_weights() -> None:
    weight = _weight(torch.float64)
    packed = pack_float8(weight, "float8")
    rounded, x, g = packed.whole(), torch.randn(7, 200, dtype=torch.float64), torch.randn(7, 300, dtype=torch.float64)
    assert torch.equal(frozen_linear(x, packed, None), torch.nn.functional.linear(round_tokens(x), rounded))
    assert torch.equal(gradient_of_input(g, packed), round_tokens(g) @ rounded)
    assert not torch.equal(round_tokens(x), x)
    assert not torch.equal(rounded, weight)


def test_of_the_backward_alone_the_forward_is_plain() -> None:
    weight = _weight(torch.float64)
    packed, rounded = pack_float8(weight, "float8_backward"), pack_float8(weight, "float8").whole()
    x = torch.randn(2, 3, 200, dtype=torch.float64, requires_grad=True)
    y = frozen_linear(x, packed, None)
    assert torch.equal(y, torch.nn.functional.linear(x, weight))
    g = torch.randn_like(y)
    y.backward(g)
    assert x.grad is not None
    assert torch.equal(x.grad.view(6, 200), round_tokens(g.view(6, 300)) @ rounded)
    assert torch.equal(packed.whole(), weight)


@pytest.mark.parametrize("kind", ["float8", "float8_backward"])
def test_products_of_gpus_are_near_the_definition(kind: str) -> None:
    """The whole way of a GPU, on a CPU, whose product of codes takes scales of rows too."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(320, 192, generator=generator).bfloat16()
    x, g = torch.randn(5, 192, generator=generator).bfloat16(), torch.randn(5, 320, generator=generator).bfloat16()
    packed, bias = pack_float8(weight, kind), torch.randn(320, generator=generator).bfloat16()
    on_gpu = for_kernels(packed, "w")
    assert on_gpu.scales.shape == (320, 1)
    assert (on_gpu.whole() != packed.whole()).float().mean() < 1e-4
    assert on_gpu.has_backward
    assert on_gpu.has_forward == (kind == "float8")
    assert not packed.has_backward
    assert _error(on_gpu.gradient(g), gradient_of_input(g.float(), _as(packed, torch.float32))) < 3e-3
    y = torch.empty(5, 320, dtype=torch.bfloat16)
    if on_gpu.has_forward:
        on_gpu.write_product(y, x, bias)
        assert _error(y, frozen_linear(x.float(), _as(packed, torch.float32), bias.float())) < 3e-3


def _as(packed: Packed, dtype: torch.dtype) -> Packed:
    if packed.form.holds_numbers:
        return pack_float8(packed.codes.to(dtype), "float8_backward")
    return packed.to(torch.device("cpu"), dtype)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def test_inputs_that_are_shared_are_rounded_once_and_changed_ones_again() -> None:
    weight = for_kernels(pack_float8(torch.randn(64, 32).bfloat16(), "float8"), "w")
    x, y = torch.randn(4, 32).bfloat16(), torch.empty(4, 64, dtype=torch.bfloat16)
    weight.write_product(y, x, None)
    codes = float8_gpu._last[0].codes
    weight.write_product(y, x.view(4, 32), None)
    assert float8_gpu._last[0].codes is codes
    x.mul_(3)
    before = y.clone()
    weight.write_product(y, x, None)
    assert float8_gpu._last[0].codes is not codes
    assert not torch.equal(y, before)


def test_inputs_of_the_forward_are_let_go_in_the_backward() -> None:
    weight = for_kernels(pack_float8(torch.randn(64, 32).bfloat16(), "float8"), "w")
    weight.write_product(torch.empty(4, 64, dtype=torch.bfloat16), torch.randn(4, 32).bfloat16(), None)
    assert float8_gpu._last
    weight.gradient(torch.randn(4, 64).bfloat16())
    assert not float8_gpu._last


def test_a_bias_that_trains_enters_in_the_dtype_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernel takes no other; that of a CPU does."""
    given, product = [], float8_gpu.scaled_product

    def seen(*tensors: Tensor, bias: Tensor | None, out: Tensor) -> None:
        given.append(None if bias is None else bias.dtype)
        product(*tensors, bias=bias, out=out)

    monkeypatch.setattr(float8_gpu, "scaled_product", seen)
    weight = for_kernels(pack_float8(torch.randn(64, 32).bfloat16(), "float8"), "w")
    weight.write_product(torch.empty(4, 64, dtype=torch.bfloat16), torch.randn(4, 32).bfloat16(), torch.randn(64))
    assert given == [torch.bfloat16]


def test_a_transposed_view_of_the_inputs_before_is_another_input() -> None:
    weight = for_kernels(pack_float8(torch.randn(64, 32).bfloat16(), "float8"), "w")
    x = torch.randn(32, 32).bfloat16()
    y, wanted = torch.empty(2, 32, 64, dtype=torch.bfloat16)
    weight.write_product(wanted, x.T.contiguous(), None)
    weight.write_product(y, x, None)
    weight.write_product(y, x.T, None)
    assert torch.equal(y, wanted)


@pytest.mark.parametrize(
    ("dtype", "capability", "width", "refused"),
    [
        (torch.bfloat16, (9, 0), 32, ""),
        (torch.float32, (9, 0), 32, "its products are bfloat16; use model.dtype: bfloat16"),
        (torch.bfloat16, (8, 6), 32, "a card, capability 8.6: tensor cores take float8 from 8.9 on"),
        (torch.bfloat16, (9, 4), 32, "model.compute on a card, of ROCm: its e4m3 may have another range"),
        (torch.bfloat16, (9, 0), 24, "linear, [32, 24] on each rank: a GPU's kernel takes multiples of 16"),
    ],
)
def test_a_gpu_without_such_products_is_refused(
    dtype: torch.dtype, capability: tuple[int, int], width: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.version, "hip", "7.0" if "ROCm" in refused else None)
    model, leaf = torch.nn.Module(), FrozenMatrix()
    leaf.hold(pack_float8(torch.randn(32, width), "float8"))
    model.linear = leaf
    experts = {"experts": Packing("fp8", (128, 128), 4)}  # in few bits for memory alone
    plan = SimpleNamespace(compute="fp8", quantized={"linear": Packing("float8", (128, 128), 1)} | experts)
    found = ""
    try:
        float8_gpu.check_gpu_of(model, plan, BaseOptions(), dtype=dtype, device=torch.device("cuda"))  # type: ignore[arg-type]
    except UnsupportedError as error:
        found = str(error)
    assert refused in found
    assert bool(refused) == bool(found)


class _OnGpu(Tensor):
    """A tensor of a CPU that says that it is a GPU's."""

    is_cuda = True


def test_a_product_of_a_gpu_is_compared_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_gpu, "_checked", set())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    recording = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording[0])
    compared = []

    def compare(tokens: int, width: int, by: float = 1.0, start: float = 1.0) -> None:
        x = torch.full((tokens, width), start)

        def definition(rows: Tensor) -> Tensor:
            compared.append((len(rows), width))
            return rows @ torch.ones(width, 8)

        found = (by * (x @ torch.ones(width, 8))).as_subclass(_OnGpu)
        float8_gpu.check_once("forward", found, x, definition)

    for tokens in (700, 701, 1023, 0, 5):  # batches have any length
        compare(tokens, 16)
    recording[0] = True
    compare(700, 32)  # nothing can be read inside a record
    recording[0] = False
    compare(700, 32)  # of a matrix of the same height
    assert compared == [(350, 16), (5, 16), (350, 32)]
    compare(100, 16, start=float("inf"))  # says nothing of the product
    with pytest.raises(UnsupportedError, match=r"a product .100, 8. of the forward: it is 1\.0e-02 off its definition"):
        compare(100, 16, by=1.01)


@pytest.mark.parametrize("kind", ["float8", "float8_backward"])
def test_a_matrix_that_one_scale_would_change_is_refused(kind: str) -> None:
    weight = torch.randn(256, 128)
    weight[128:] *= 2.0**-16
    with pytest.raises(UnsupportedError, match=r"which changes a block of q_proj by [567]\..e-01 of its norm"):
        for_kernels(pack_float8(weight, kind), "q_proj")


def test_a_matrix_with_outliers_is_taken() -> None:
    """As trained ones have them: many of its other numbers are below the normal range, and hardly change."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(256, 256, generator=generator)
    weight[3, 5] = 100.0
    packed = pack_float8(weight, "float8")
    with_one = for_kernels(packed, "down_proj").whole()
    assert (with_one != packed.whole()).float().mean() > 1e-4
    assert _error(with_one, packed.whole()) < 1e-4
