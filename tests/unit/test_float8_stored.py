"""Products of matrices that are float8 already: by what is stored, in both directions, rounded never again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshlora.layers.frozen import frozen_linear, gradient_of_input
from meshlora.wings.quantized.float8 import round_tokens
from meshlora.wings.quantized.float8_matrix import pack_float8
from meshlora.wings.quantized.float8_stored import StoredForm, multiplied_as_stored, stored_for_kernels
from meshlora.wings.quantized.kinds import STORED
from meshlora.wings.quantized.quantized import Form, Packed, joined, pack
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.slow_paths import UNPACKED_FOR_BACKWARD
from meshlora_judge import float8 as judge

_SHAPE = 320, 192


def _stored(scales: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float64) -> Packed:
    """Any codes `_SHAPE` with `scales` of blocks `[rows, columns]`, the last ones smaller."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(_SHAPE, generator=generator).mul(100).to(torch.float8_e4m3fn).view(torch.uint8)
    down, across = (
        tuple(min(size, whole - start) for start in range(0, whole, size))
        for size, whole in zip((rows, columns), _SHAPE, strict=True)
    )
    assert scales.shape == (len(down), len(across))
    return Packed(codes, scales, Form("fp8", dtype, down, across))


def _of(scales: str, dtype: torch.dtype = torch.float64) -> Packed:
    """Scales as checkpoints have them."""
    drawn = torch.rand(3, 2, generator=torch.Generator().manual_seed(1)) * 0.01 + 0.001
    of_rows = torch.rand(320, 1, generator=torch.Generator().manual_seed(2)) * 0.01 + 0.001
    made = {
        "blocks": (drawn, 128, 128),
        "powers": (torch.tensor([[118, 119], [120, 118], [117, 118]], dtype=torch.uint8), 128, 128),
        "powers in float32": (torch.tensor([[2.0**-9, 2.0**-8]] * 3), 128, 128),
        "rows": (of_rows, 1, 192),
        "rows in bfloat16": (of_rows.bfloat16(), 1, 192),
        "one": (torch.tensor([[0.0037]]), 320, 192),
        "groups": (of_rows.expand(320, 2) * torch.tensor([1.0, 1.5]), 1, 128),
        "squares": (torch.rand(10, 6, generator=torch.Generator().manual_seed(3)) + 0.5, 32, 32),
        "powers too far apart": (torch.tensor([[2.0**-20, 2.0**-2]] * 3), 128, 128),
    }
    return _stored(*made[scales], dtype=dtype)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("scales", ["blocks", "powers", "rows", "rows in bfloat16", "one"])
def test_both_directions_multiply_by_what_is_stored(scales: str) -> None:
    packed = _of(scales)
    numbers, of_codes = packed.whole(), packed.codes.view(torch.float8_e4m3fn).double()
    assert ((numbers / of_codes).nan_to_num(1.0) > 0).all()
    matrix = multiplied_as_stored(packed, STORED["fp8"])
    assert matrix.codes is packed.codes
    assert matrix.scales is packed.scales
    x, g = torch.randn(7, 192, dtype=torch.float64), torch.randn(7, 320, dtype=torch.float64)
    assert torch.equal(frozen_linear(x, matrix, None), torch.nn.functional.linear(round_tokens(x), numbers))
    assert torch.equal(gradient_of_input(g, matrix), round_tokens(g) @ numbers)
    of_backward = multiplied_as_stored(packed, STORED["fp8_backward"])
    assert torch.equal(frozen_linear(x, of_backward, None), torch.nn.functional.linear(x, numbers))
    assert torch.equal(gradient_of_input(g, of_backward), round_tokens(g) @ numbers)


def test_what_is_stored_is_not_what_rounding_again_would_make() -> None:
    numbers = _of("blocks").whole()
    assert _error(pack_float8(numbers, "float8").whole(), numbers) > 1e-2


def test_a_part_multiplies_as_the_whole_matrix_does() -> None:
    packed = pack(torch.randn(_SHAPE, dtype=torch.float64), "fp8")
    whole = multiplied_as_stored(packed, STORED["fp8"])
    parts = [multiplied_as_stored(packed.part((0, 320), bounds), STORED["fp8"]) for bounds in ((0, 96), (96, 192))]
    x, g = torch.randn(7, 192, dtype=torch.float64), torch.randn(7, 320, dtype=torch.float64)
    found = frozen_linear(x[:, :96], parts[0], None) + frozen_linear(x[:, 96:], parts[1], None)
    assert _error(found, frozen_linear(x, whole, None)) < 1e-15
    assert torch.equal(torch.cat([gradient_of_input(g, part) for part in parts], 1), gradient_of_input(g, whole))


@pytest.mark.parametrize(
    ("scales", "has_backward"),
    [
        ("powers", True),
        ("powers in float32", True),
        ("powers too far apart", True),
        ("one", True),
        ("blocks", True),
        ("squares", True),
        ("rows", False),
        ("rows in bfloat16", False),
    ],
)
def test_products_of_gpus_are_near_the_definition(
    scales: str, has_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way of a GPU, on a CPU, whose product of codes takes scales of rows too."""
    packed = _of(scales, torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    x, g = (torch.randn(5, size, generator=generator).bfloat16() for size in (192, 320))
    bias, exact = torch.randn(320, generator=generator).bfloat16(), _of(scales, torch.float32).whole()
    taken: list[object] = []
    monkeypatch.setattr("meshlora.wings.quantized.float8_stored.take", lambda path, _: taken.append(path))
    on_gpu = stored_for_kernels(multiplied_as_stored(packed, STORED["fp8"]), "w")
    assert (on_gpu.has_forward, on_gpu.has_backward) == (True, has_backward)
    # As a leaf holds it.
    on_gpu = on_gpu.form.matrix(on_gpu.codes, on_gpu.scales)
    y = torch.empty(5, 320, dtype=torch.bfloat16)
    on_gpu.write_product(y, x, bias)
    assert _error(y, torch.nn.functional.linear(round_tokens(x.float()), exact, bias.float())) < 3e-3
    assert not taken
    assert _error(gradient_of_input(g, on_gpu), round_tokens(g.float()) @ exact) < 3e-3
    assert taken == [UNPACKED_FOR_BACKWARD] * (not has_backward)


@pytest.mark.parametrize("scales", ["powers", "one", "blocks"])
def test_of_the_backward_alone_a_gpu_unpacks_for_the_forward(scales: str) -> None:
    packed = _of(scales, torch.bfloat16)
    on_gpu = stored_for_kernels(multiplied_as_stored(packed, STORED["fp8_backward"]), "w")
    assert (on_gpu.has_forward, on_gpu.has_backward) == (False, True)
    x, g = torch.randn(5, 192).bfloat16(), torch.randn(5, 320).bfloat16()
    exact = _of(scales, torch.float32).whole()
    assert _error(frozen_linear(x, on_gpu, None), x.float() @ exact.T) < 3e-3
    assert _error(on_gpu.gradient(g), round_tokens(g.float()) @ exact) < 3e-3


@pytest.mark.parametrize(("rows", "columns", "step"), [((0, 320), (0, 192), 128), ((0, 320), (0, 64), 128),
    ((64, 320), (0, 192), 64), ((0, 320), (96, 192), 32), ((160, 320), (0, 192), 32)])  # fmt: skip
def test_parts_and_what_is_joined_of_them_have_squares_with_one_scale(
    rows: tuple[int, int], columns: tuple[int, int], step: int
) -> None:
    """As a tp leaves them, whose cut crosses blocks, and as matrices lie that are one in memory."""
    part = _of("blocks", torch.float32).part(rows, columns)
    for given in (part, joined([part, part], -2)):
        on_gpu = stored_for_kernels(multiplied_as_stored(given, STORED["fp8"]), "w")
        assert torch.equal(on_gpu.whole(), given.whole())
        x, g = (torch.randn(5, size) for size in reversed(given.shape))
        y = torch.empty(5, given.shape[0])
        on_gpu.write_product(y, x, None)
        exact = given.to(torch.device("cpu"), torch.float64).whole()
        assert _error(y, round_tokens(x.double()) @ exact.T) < 1e-6
        assert _error(on_gpu.gradient(g), round_tokens(g.double()) @ exact) < 1e-6
        assert isinstance(on_gpu.form, StoredForm)
        if given is part:
            assert on_gpu.form.step == step


@pytest.mark.parametrize(
    ("scales", "compute"), [("groups", "fp8"), ("groups", "fp8_backward"), ("rows", "fp8_backward")]
)
def test_scales_that_no_kernel_takes_are_refused(scales: str, compute: str) -> None:
    matrix = multiplied_as_stored(_of(scales, torch.bfloat16), STORED[compute])
    said = "blocks of 1 x 128" if scales == "groups" else "rows"
    with pytest.raises(UnsupportedError, match=f"model.compute on a GPU of q_proj, stored with scales of {said}: its"):
        stored_for_kernels(matrix, "q_proj")


@pytest.mark.parametrize("quantization", ["fp8", None])
def test_judge_rounds_what_is_not_rounded_yet_and_nothing_twice(quantization: str | None) -> None:
    linear, numbers = torch.nn.Linear(192, 320, bias=False).double(), _of("blocks").whole()
    linear.weight.data.copy_(numbers)
    judge.multiply_in_float8(_Model(linear), "fp8", quantization=quantization)
    assert torch.equal(linear.weight, numbers) == (quantization is not None)


class _Model(torch.nn.Module):
    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def get_output_embeddings(self) -> None:
        """It has no head."""
