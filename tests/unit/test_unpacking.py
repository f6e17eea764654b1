"""Unpacking quantised matrices: the same bits for any blocks, in any number of parts, on CPUs and as GPUs do it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from meshlora.wings.quantized import quantized
from meshlora.wings.quantized.kinds import BITS, FACTOR_BYTES, OF_LIBRARY, STORED, WITH_ZEROS, Touched
from meshlora.wings.quantized.quantized import Form, Packed, joined, stacked, with_factors
from meshlora_extra.planner.fake import is_view
from meshlora_ground.compat.torch_operators import TorchDispatchMode
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.slow_paths import UNPACKED_IN_PIECES, UNPACKED_WITHOUT_KERNEL, SlowPath
from tests.for_each import for_each

CPU = torch.device("cpu")
# (rows, columns) of blocks. Three times 96 is all of 96, 128 and 64.
_BLOCKS = {
    "equal": ((1,) * 40, (64,) * 4),
    "cut columns": ((1,) * 40, (96, 128, 64)),
    "cut rows and columns": ((96, 128, 64), (96, 128, 64)),
    "joined": ((30, 64, 64, 2, 30, 64), (64, 64, 2, 62)),
    "one": ((40,), (192,)),
}


def _random(kind: str, rows: tuple[int, ...], columns: tuple[int, ...], dtype: torch.dtype) -> Packed:
    """A matrix of blocks of these sizes."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(256, (sum(rows), sum(columns) * BITS[kind] // 8), generator=generator).to(torch.uint8)
    if kind in ("fp8", "fp8_e5m2", *STORED.values()):
        codes &= 0xBF  # all are numbers
    scales = torch.randn(len(rows), len(columns), generator=generator)
    if kind in WITH_ZEROS:
        zeros = torch.randint(2 ** BITS[kind], scales.shape, generator=generator)
        scales = torch.stack([scales, zeros], -1).flatten(1)
    if kind == "mxfp4":
        scales = (127 + 3 * scales).to(torch.uint8)
    if kind == "nvfp4":
        scales = with_factors(scales.to(torch.float8_e4m3fn), torch.rand(len(rows), generator=generator))
    return Packed(codes, scales, Form(kind, dtype, rows, columns))


def _expected(packed: Packed) -> Tensor:
    """Each number times its scale, element by element."""
    kind, codes, scales = packed.form.kind, packed.codes, packed.scales
    if BITS[kind] == 4:
        halves = [codes >> 4, codes & 15] if kind in ("nf4", "fp4") else [codes & 15, codes >> 4]
        numbers = quantized.values_of(kind)[torch.stack(halves, -1).flatten(1).long()]
    elif kind == "int8":
        numbers = torch.tensor(quantized.levels_of_int8())[codes.long()]
    else:
        dtypes = {"fp8_e5m2": torch.float8_e5m2, "integers": torch.int8, "ints8": torch.uint8}
        numbers = codes.view(dtypes.get(kind, torch.float8_e4m3fn)).float()
    if kind == "mxfp4":
        scales = torch.exp2(scales.float() - 127)
    if kind == "nvfp4":
        factors = torch.tensor(scales[:, -4:].tolist(), dtype=torch.uint8).view(torch.float32)
        scales = scales[:, :-4].view(torch.float8_e4m3fn).float() * factors
    zeros = torch.zeros(len(scales), len(packed.form.columns))
    if kind in WITH_ZEROS:
        scales, zeros = scales[:, ::2], scales[:, 1::2]
    for dim, counts in enumerate((packed.form.rows, packed.form.columns)):
        scales = scales.repeat_interleave(torch.tensor(counts), dim)
        zeros = zeros.repeat_interleave(torch.tensor(counts), dim)
    return ((numbers - zeros) * scales).to(packed.form.dtype)


@for_each("on_gpu", [False, True], ids=["cpu", "as a gpu"])
@for_each("kind", BITS)
def test_rows_unpacked_in_parts_take_the_scales_of_their_own_blocks(
    kind: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows at a time, 130, all. bitsandbytes' kernels run on CPUs too."""
    if on_gpu:
        monkeypatch.setattr(Tensor, "is_cpu", False)
    for name, blocks in _BLOCKS.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            packed = _random(kind, *blocks, dtype)
            expected = _expected(packed)
            for elements in (5 * 288, 130 * 288, 2**28):
                monkeypatch.setattr(quantized, "elements_at_once", lambda *_, found=elements, **__: found)
                assert torch.equal(packed.whole(), expected), (name, dtype, elements)


@for_each("kind", ["signed4", "ints4", "ints8"])
@for_each("dtype", [torch.bfloat16, torch.float64])
def test_columns_in_any_order_have_the_scale_of_their_own_block(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_order = _random(kind, (1,) * 40, (64,) * 4, dtype)
    order = torch.arange(256) // 64
    form = dataclasses.replace(in_order.form, columns=(1,) * 4, order=order.flip(0))
    packed = form.matrix(in_order.codes, in_order.scales)
    numbers = in_order.scales.unflatten(1, (4, -1))
    turned = numbers.flip(1).flatten(1)  # the scales of the blocks in reverse: as columns are, of equal blocks
    expected = in_order.form.matrix(in_order.codes, turned).whole()
    for elements in (5 * 256, 2**28):
        monkeypatch.setattr(quantized, "elements_at_once", lambda *_, found=elements, **__: found)
        assert torch.equal(packed.whole(), expected)
    stack = stacked([packed, dataclasses.replace(form, order=order).matrix(packed.codes, packed.scales)])
    assert torch.equal(stack.whole(), torch.stack([expected, in_order.whole()]))
    assert torch.equal(joined([packed, packed], -1).whole(), torch.cat([expected, expected], 1))
    assert torch.equal(joined([packed, packed], -2).whole(), torch.cat([expected, expected]))
    with pytest.raises(UnsupportedError, match="as gate and up of an expert, need their inputs in the same order"):
        joined([packed, stack.one(1)], -2)


class _Launches(TorchDispatchMode):
    """Records the operators on more elements than tables have, of which one is made once."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.name()
        is_large = any(isinstance(t, Tensor) and t.numel() > 512 for t in (found, *args))
        if is_large and not is_view(func) and not name.startswith("aten::empty"):
            self.names.append(name)
        return found


@for_each(
    ("kind", "block", "number"),
    [
        ("nf4", (1, 64), 1),
        ("int8", (1, 64), 1),
        ("fp8", (128, 128), 2),
        ("fp8", (96, 128), 3),  # the last rows are a block of their own
        ("mxfp4", (1, 32), 4),
        ("nvfp4", (1, 16), 6),  # three of them of scales: a factor, a float32, their product
        ("nf4", (1, 56), 4),  # in blocks that the kernel does not take
        ("ints4", (1, 128), 4),  # a zero is taken off first
        ("ints8", (1, 128), 3),
    ],
)
@for_each("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_unpacks_a_matrix_in_few_launches(
    kind: str, block: tuple[int, int], number: int, dtype: torch.dtype
) -> None:
    """One of an 8B model. In parts for a CPU's cache they would be 32 times as many, and more."""
    shape = (4096, 14336)
    rows, columns = (Touched.by(0, size, each).counts for size, each in zip(shape, block, strict=True))
    of_scales = torch.uint8 if kind in ("mxfp4", "nvfp4") else torch.float32
    across = len(columns) * (1 + (kind in WITH_ZEROS)) + FACTOR_BYTES.get(kind, 0)
    packed = Packed(
        torch.empty(4096, 14336 * BITS[kind] // 8, dtype=torch.uint8, device="meta"),
        torch.empty(len(rows), across, dtype=of_scales, device="meta"),
        Form(kind, dtype, rows, columns),
    )
    with _Launches() as launches:
        found = packed.whole()
    assert (found.shape, found.dtype) == (shape, dtype)
    assert len(launches.names) == number, launches.names


def test_what_a_gpu_unpacks_at_once_has_a_limit() -> None:
    rows, width = 2**15, 2**15
    at_once = quantized.elements_at_once(rows * width, on_cpu=False)
    parts = list(quantized.runs(((128, rows // 128),), at_once // width))
    assert len(parts) == 4
    assert all((part.elements.stop - part.elements.start) * width <= 2**28 for part in parts)


@for_each("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@for_each("kind", OF_LIBRARY)
def test_the_librarys_kernel_gives_the_bits_of_the_definition(kind: str, dtype: torch.dtype) -> None:
    for block in (32, 64, 128):
        assert quantized._disagreement(kind, block, dtype, CPU) is None


def test_a_kernel_with_other_numbers_or_none_is_not_used_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = _random("nf4", *_BLOCKS["equal"], torch.bfloat16)
    assert quantized.unpacked_slowly(packed) is None  # a CPU's own way
    monkeypatch.setattr(Tensor, "is_cpu", False)
    assert quantized.unpacked_slowly(packed) is None
    assert quantized.unpacked_slowly(_random("fp8", *_BLOCKS["equal"], torch.bfloat16)) is None
    cut = quantized.unpacked_slowly(_random("nf4", *_BLOCKS["cut columns"], torch.bfloat16))
    assert cut == "a cut crosses the blocks of nf4, and bitsandbytes' kernel takes whole ones"
    kernel = quantized._by_library

    def missing(*_: Any) -> Tensor:
        raise RuntimeError("no kernel")

    cases = {
        "gives other numbers": lambda codes, *rest: kernel((codes >> 4) | (codes << 4), *rest),
        "does not run (RuntimeError: no kernel)": missing,
    }
    for words, wrong in cases.items():
        quantized._disagreement.cache_clear()
        monkeypatch.setattr(quantized, "_by_library", wrong)
        assert quantized.unpacked_slowly(packed) == f"bitsandbytes' kernel for nf4 on cpu in torch.bfloat16 {words}"
        assert torch.equal(packed.whole(), _expected(packed))
    quantized._disagreement.cache_clear()


def test_a_gpu_that_unpacks_in_pieces_or_without_the_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[SlowPath] = []
    monkeypatch.setattr(quantized, "take", lambda path, device: taken.append(path))
    monkeypatch.setattr(Tensor, "is_cpu", False)
    _random("nf4", *_BLOCKS["equal"], torch.bfloat16).whole()
    assert taken == []
    _random("nf4", *_BLOCKS["cut columns"], torch.bfloat16).whole()
    assert taken == [UNPACKED_WITHOUT_KERNEL]
    monkeypatch.setattr(quantized, "_ON_GPU", 512)
    _random("fp8", *_BLOCKS["equal"], torch.bfloat16).whole()
    assert taken == [UNPACKED_WITHOUT_KERNEL, UNPACKED_IN_PIECES]
