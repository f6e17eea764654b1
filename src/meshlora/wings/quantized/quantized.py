"""Frozen matrices in few bits: packed in memory, and unpacked for the duration of one product.

Owns: packing a matrix, its parts, unpacking it, and the view as plain weights. Does not own: the leaf that holds one,
and its product (`layers.frozen`), which matrices are packed (`wings.quantized.kinds`), reading packed ones
(`wings.quantized.packed`); the quantisation to nf4 and int8 and their levels, which are bitsandbytes'.

Of a stack of experts one matrix is unpacked at a time.

A GPU unpacks a matrix at once: nf4, fp4 and int8 by bitsandbytes' kernel, if it gives the bits of the definition
(`_by_definition`), others in two to six launches. A CPU goes by the definition, some rows at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlora.layers.frozen import FewBits, FrozenMatrix
from meshlora.wings.quantized.kinds import (
    BITS,
    FACTOR_BYTES,
    FLOAT8_BLOCK,
    MX_BLOCK,
    NV_BLOCK,
    OF_LIBRARY,
    STORED,
    WITH_ZEROS,
    Touched,
)
from meshlora_ground.errors import UnsupportedError, reason
from meshlora_ground.slow_paths import UNPACKED_IN_PIECES, UNPACKED_WITHOUT_KERNEL, take

_BLOCK = 64  # of bitsandbytes, consecutive input features
_FP8_MOST = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_OF_8_BITS = {
    "fp8": torch.float8_e4m3fn,
    "float8": torch.float8_e4m3fn,
    **dict.fromkeys(STORED.values(), torch.float8_e4m3fn),
    "fp8_e5m2": torch.float8_e5m2,
    "integers": torch.int8,
    "ints8": torch.uint8,
}
_OF_E2M1 = ("mxfp4", "nvfp4")
_LOW_HALF_FIRST = (*_OF_E2M1, "ints4", "signed4")
# Kinds whose numbers, without scales, need no more than 16 bits.
_SHORT = (*_OF_8_BITS, *_LOW_HALF_FIRST)
# Blocks that bitsandbytes' kernels take.
_BLOCKS_OF_LIBRARY = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# Elements unpacked at once. On a CPU they stay in its cache, and hardly count beside the matrix. On a GPU they are a
# whole matrix of all but the largest models, and need at most 2 GiB beside it.
_IN_CACHE, _ON_GPU = 2**18, 2**28


def bitsandbytes_functions() -> Any:
    """bitsandbytes' functions. Imported on use: it takes seconds."""
    import bitsandbytes.functional

    return bitsandbytes.functional


@dataclass(frozen=True)
class Form:
    """How codes and scales are a matrix.

    Attributes:
        kind: one of `wings.quantized.kinds.BITS`. dtype: of the numbers.
        rows, columns: along each dim of the codes, how many elements share a scale, block by block.
        is_transposed: whether the matrix is the transpose of the codes.
        divides: whether scales are divided by the factor of their row, if they have one, or multiplied by it.
        order: the block of each column, `[columns]`, of a stack `[E, columns]`; None: they follow one another.
    """

    kind: str
    dtype: torch.dtype
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    is_transposed: bool = False
    divides: bool = False
    order: Tensor | None = dataclasses.field(default=None, compare=False)

    @property
    def bits(self) -> int:
        """Of a code."""
        return BITS[self.kind]

    @property
    def holds_numbers(self) -> bool:
        """Whether the codes are the plain numbers."""
        return False

    @functools.cached_property
    def mT(self) -> Form:
        """Of the transpose. Cached, as all that follows from thousands of rows is."""
        return dataclasses.replace(self, is_transposed=not self.is_transposed)

    @functools.cached_property
    def equal(self) -> tuple[Equal, Equal]:
        """Of rows, and of columns: (elements of a block, number of equal blocks that follow one another), ..."""
        return _equal(self.rows), _equal(self.columns)

    def matrix(self, codes: Tensor, scales: Tensor) -> Packed:
        """The matrix, or the stack of them, that they are."""
        return Packed(codes, scales, self)

    def numbers(self, scales: Tensor) -> Tensor:
        """Scales in float32. Bytes are exponents, but where a factor follows them: then they are e4m3."""
        if self.kind not in FACTOR_BYTES:
            return numbers_of_scales(scales)
        own, factors = scales.tensor_split((-FACTOR_BYTES[self.kind],), -1)
        # A copy: numbers of four bytes begin at a multiple of four.
        factors = factors.clone(memory_format=torch.contiguous_format).view(torch.float32)
        numbers = own.view(torch.float8_e4m3fn).float()
        if self.divides:
            return numbers / factors
        return numbers * factors


# How a dim is cut into blocks.
Equal = tuple[tuple[int, int], ...]


def _equal(counts: tuple[int, ...]) -> Equal:
    return tuple((count, len(list(blocks))) for count, blocks in itertools.groupby(counts))


class Run(NamedTuple):
    """Equal blocks that follow one another along a dim, or a part of one block: their elements, and the blocks."""

    elements: slice
    blocks: slice


def runs(equal: Equal, most: int) -> Iterator[Run]:
    """Runs of at most `most` elements: of as many blocks as fit, or a part of one that does not."""
    start = first = 0
    for count, number in equal:
        last = first + number
        while first < last:
            blocks = slice(first, min(first + max(1, most // count), last))
            stop = start + count * (blocks.stop - first)
            for begin in range(start, stop, most):
                yield Run(slice(begin, min(begin + most, stop)), blocks)
            start, first = stop, blocks.stop


@dataclass(frozen=True)
class Packed(FewBits):
    """A matrix, or a stack `[E, ...]` of them, in few bits.

    Attributes:
        codes: uint8 `[..., rows, columns]`, with 4 bits `[..., rows, columns/2]`. scales: `[..., blocks of rows, blocks
            of columns]`, floats, or uint8: powers of two (e8m0), or e4m3 and the factor of the row. Of `ints4` and
            `ints8` `[..., rows, 2 * blocks of columns]`: of each block the scale and the zero.
    """

    codes: Tensor
    scales: Tensor
    form: Form
    has_forward: bool = False
    has_backward: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the plain weight."""
        *stack, rows, width = self.codes.shape  # of bytes
        columns = width * 8 // self.form.bits
        if self.form.is_transposed:
            rows, columns = columns, rows
        return *stack, rows, columns

    @property
    def mT(self) -> Packed:
        """The transpose of the last two dims."""
        return dataclasses.replace(self, form=self.form.mT)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> Tensor:
        """The matrix of one expert of a stack, unpacked."""
        return self.one(expert).whole()

    def one(self, expert: int) -> Packed:
        """The matrix of one expert of a stack."""
        form = self.form
        if form.order is not None:
            form = dataclasses.replace(form, order=form.order[expert])
        return form.matrix(self.codes[expert], self.scales[expert])

    @torch.no_grad()
    def whole(self) -> Tensor:
        """The plain weight: unpacked in float32, then rounded to its dtype."""
        if self.codes.ndim == 3:
            return torch.stack([self[expert] for expert in range(len(self))])
        found = _by_rows(self)
        if self.form.is_transposed:
            return found.T
        return found

    def to(self, device: torch.device, dtype: torch.dtype) -> Packed:
        """On `device`, of numbers in `dtype`."""
        order = self.form.order
        if order is not None:
            order = order.to(device)
        form = dataclasses.replace(self.form, dtype=dtype, order=order)
        return form.matrix(self.codes.to(device), self.scales.to(device))

    def part(self, rows: tuple[int, int], columns: tuple[int, int]) -> Packed:
        """A slice of a matrix of whole blocks, of the codes as they lie."""
        form = self.form
        down, across = Touched.by(*rows, form.rows[0]), Touched.by(*columns, form.columns[0])
        each = 8 // form.bits  # codes in a byte
        of_rows = self.scales[down.first : down.last]
        scales = of_rows[:, across.first : across.last]
        if form.kind in FACTOR_BYTES:
            scales = torch.cat([scales, of_rows[:, -FACTOR_BYTES[form.kind] :]], 1)
        # Copies: a view would keep the whole matrix alive.
        codes = self.codes[slice(*rows), columns[0] // each : columns[1] // each].contiguous()
        return dataclasses.replace(form, rows=down.counts, columns=across.counts).matrix(codes, scales.contiguous())


def joined(parts: Sequence[Packed], dim: int) -> Packed:
    """Packed parts put together along dim -2 or -1 of the plain weight."""
    first, *others = parts
    if not others:
        return first
    if first.form.is_transposed:
        dim = -3 - dim  # the other of the last two: codes and scales are those of the transpose
    if first.form.order is not None:
        return _joined_in_order(parts, dim)
    rows, columns = first.form.rows, first.form.columns
    for part in others:
        if dim == -2:
            rows += part.form.rows
        else:
            columns += part.form.columns
    form = dataclasses.replace(first.form, rows=rows, columns=columns)
    codes, scales = [part.codes for part in parts], [part.scales for part in parts]
    if dim == -1 and form.kind in FACTOR_BYTES:  # all have the rows' factors: those of the last stay
        scales[:-1] = [own[..., : -FACTOR_BYTES[form.kind]] for own in scales[:-1]]
    return form.matrix(torch.cat(codes, dim), torch.cat(scales, dim))


def _joined_in_order(parts: Sequence[Packed], dim: int) -> Packed:
    """`joined`, of codes as they lie, where each part has the scales of all blocks, and says the block of each column.

    Raises:
        UnsupportedError: rows have columns in several orders.
    """
    form, orders = parts[0].form, [part.form.order for part in parts if part.form.order is not None]
    codes, scales = torch.cat([part.codes for part in parts], dim), parts[0].scales
    if dim == -1:
        return dataclasses.replace(form, order=torch.cat(orders)).matrix(codes, scales)
    if not all(torch.equal(order, orders[0]) for order in orders):
        rule = "matrices that are one in memory, as gate and up of an expert, need their inputs in the same order"
        raise UnsupportedError("quantization keep of integers in the order of activations", rule, "leave it out")
    rows = sum((part.form.rows for part in parts), ())
    return dataclasses.replace(form, rows=rows).matrix(codes, torch.cat([part.scales for part in parts], -2))


def stacked(parts: Sequence[Packed]) -> Packed:
    """A stack of packed matrices."""
    form = parts[0].form
    for part in parts:
        assert part.form == form, (part.form, form)
    if form.order is not None:
        orders = [part.form.order for part in parts if part.form.order is not None]
        form = dataclasses.replace(form, order=torch.stack(orders))
    codes, scales = [part.codes for part in parts], [part.scales for part in parts]
    return Packed(torch.stack(codes), torch.stack(scales), form)


def with_factors(scales: Tensor, factors: Tensor) -> Tensor:
    """Scales e4m3 `[..., rows, blocks]` with the float32 factors `[..., rows]` behind them, as bytes."""
    of_rows = factors.unsqueeze(-1).contiguous().view(torch.uint8)
    return torch.cat([scales.view(torch.uint8), of_rows], -1)


def numbers_of_scales(scales: Tensor) -> Tensor:
    """Scales in float32; bytes are exponents."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float()


# --- unpacking --------------------------------------------------------------------------------------------------------


def elements_at_once(number: int, *, on_cpu: bool) -> int:
    """How many of the `number` elements of a matrix are unpacked at once."""
    if on_cpu:
        return max(_IN_CACHE, number // 32)
    return _ON_GPU


def _by_rows(packed: Packed) -> Tensor:
    """The matrix of the codes, unpacked at once or some rows at a time."""
    form, codes, scales = packed.form, packed.codes, packed.form.numbers(packed.scales)
    takes_kernel = form.kind in OF_LIBRARY and not scales.is_cpu and unpacked_slowly(packed) is None
    if form.kind in OF_LIBRARY and not takes_kernel:
        take(UNPACKED_WITHOUT_KERNEL, codes.device)

    def unpack(codes: Tensor, scales: Tensor, rows: Equal) -> Tensor:
        if takes_kernel:
            return _by_library(codes, scales, form)
        return _by_definition(codes, scales, rows, form)

    rows, width = len(codes), codes.shape[1] * 8 // form.bits
    at_once = elements_at_once(rows * width, on_cpu=scales.is_cpu)
    if rows * width <= at_once:
        return unpack(codes, scales, form.equal[0]).to(form.dtype)
    take(UNPACKED_IN_PIECES, codes.device)
    found = torch.empty(rows, width, dtype=form.dtype, device=codes.device)
    for part in runs(form.equal[0], max(1, at_once // width)):
        values, own = codes[part.elements], scales[part.blocks]
        found[part.elements] = unpack(values, own, ((len(values) // len(own), len(own)),))
    return found


def _by_definition(codes: Tensor, scales: Tensor, rows: Equal, form: Form) -> Tensor:
    """The number of each code times the scale of its block, computed in float32.

    codes, scales: of these rows; scales in float32.
    """
    on_cpu = scales.is_cpu
    is_short = form.kind in _SHORT and form.dtype in (torch.bfloat16, torch.float16)
    # In place a product is computed in float32 and rounded: on a GPU in one launch, on a CPU by copies.
    dtype = torch.float32
    if is_short and not on_cpu:
        dtype = form.dtype
    if form.kind in _OF_8_BITS and not on_cpu:  # on CPUs a table is five times as fast
        values = codes.view(_OF_8_BITS[form.kind]).to(dtype)
    else:
        table = _table(form.kind, dtype, scales.device)
        values = table.index_select(0, codes.reshape(-1).int()).view(dtype).view(len(codes), -1)
    zeros = None
    if form.kind in WITH_ZEROS:
        scales, zeros = scales.unflatten(-1, (-1, 2)).unbind(-1)
    if form.order is not None:  # columns of a block lie anywhere
        if zeros is not None:
            values.sub_(zeros.index_select(1, form.order))
        return values.mul_(scales.index_select(1, form.order))
    for down, across in itertools.product(runs(rows, len(values)), runs(form.equal[1], values.shape[1])):
        own = scales[down.blocks, across.blocks]
        blocks = values[down.elements, across.elements].unflatten(1, (own.shape[1], -1)).unflatten(0, (len(own), -1))
        if zeros is not None:  # of at most 8 bits, as the numbers are: exact in any dtype
            blocks.sub_(zeros[down.blocks, across.blocks][:, None, :, None])
        blocks.mul_(own[:, None, :, None])
    return values


def _by_library(codes: Tensor, scales: Tensor, form: Form) -> Tensor:
    """As `_by_definition`, by bitsandbytes' kernel: rows of equal blocks, which lie in memory as it takes them."""
    bitsandbytes_functions()  # which defines the operators
    kernels, block, scales = torch.ops.bitsandbytes, form.columns[0], scales.contiguous()
    dtype = form.dtype
    if dtype == torch.float64:  # the kernels have none; `_by_rows` widens what they give
        dtype = torch.float32
    if form.kind == "int8":
        table = _table("int8", torch.float32, scales.device)
        found: Tensor = kernels.dequantize_blockwise(codes, scales, table, block, dtype)
    else:
        found = kernels.dequantize_4bit(codes, scales, block, form.kind, (len(codes), codes.shape[1] * 2), dtype)
    return found


def unpacked_slowly(packed: Packed) -> str | None:
    """Why a GPU unpacks `packed` in several launches and not by bitsandbytes' kernel, which has its kind; else None."""
    form, device = packed.form, packed.scales.device
    if form.kind not in OF_LIBRARY or packed.scales.is_cpu:
        return None
    (rows, *others), (columns, *more) = form.equal
    block = columns[0]
    # Its kernel takes blocks of one row, all as wide.
    if others or more or rows[0] != 1 or block not in _BLOCKS_OF_LIBRARY:
        return f"a cut crosses the blocks of {form.kind}, and bitsandbytes' kernel takes whole ones"
    if device.type == "meta":  # of a plan: nothing can be tried
        return None
    return _disagreement(form.kind, block, form.dtype, device)


@functools.cache
def _disagreement(kind: str, block: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """What a small matrix says against bitsandbytes' kernel; None if it gives the bits of the definition."""
    given = f"bitsandbytes' kernel for {kind} on {device.type} in {dtype}"
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (5, 3 * block * BITS[kind] // 8), generator=generator, device="cpu").to(torch.uint8)
    scales = torch.randn(5, 3, generator=generator, device="cpu").mul(4).exp2()
    codes, scales, form = codes.to(device), scales.to(device), Form(kind, dtype, (1,) * 5, (block,) * 3)
    try:
        found = _by_library(codes, scales, form)
    except (AttributeError, RuntimeError) as error:  # no such operator, or not for this device
        return f"{given} does not run ({reason(error)})"
    if not torch.equal(found, _by_definition(codes, scales, form.equal[0], form).to(found.dtype)):
        return f"{given} gives other numbers"
    return None


@functools.cache
def _table(kind: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers that a byte stands for, by its value: one in `dtype`, or two in one integer."""
    if kind in _OF_8_BITS:
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(_OF_8_BITS[kind]).to(dtype).to(device)
    if kind == "int8":
        return torch.tensor(levels_of_int8(), device="cpu").to(device)
    values, byte = values_of(kind).to(dtype), torch.arange(256, device="cpu")
    pairs = [values[byte & 15], values[byte >> 4]]  # the low half first
    if kind not in _LOW_HALF_FIRST:  # bitsandbytes has the high half first
        pairs.reverse()
    # Both as one integer: a byte of codes takes one look-up.
    of_both = torch.int32
    if dtype == torch.float32:
        of_both = torch.int64
    return torch.stack(pairs, -1).view(of_both).flatten().to(device)


def values_of(kind: str) -> Tensor:
    """The 16 numbers of a kind of 4 bits, float32."""
    if kind in _OF_E2M1:
        positive = torch.tensor(E2M1, device="cpu")
        return torch.cat([positive, -positive])  # the highest bit is the sign
    if kind in ("ints4", "signed4"):
        numbers = torch.arange(16.0, device="cpu")
        return torch.where((numbers > 7) & (kind == "signed4"), numbers - 16, numbers)
    return bitsandbytes_functions().get_4bit_type(kind, device="cpu").float()


# --- packing ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def pack(weight: Tensor, kind: str) -> Packed:
    """Quantise `[out, in]`. The codes of a block depend on its own elements alone."""
    exact = weight.float().contiguous()
    if kind == "fp8":
        return _pack_fp8(exact, weight.dtype)
    if kind == "mxfp4":
        return _pack_mxfp4(exact, weight.dtype)
    if kind == "nvfp4":
        return _pack_nvfp4(exact, weight.dtype)
    rows, width = exact.shape
    assert width % _BLOCK == 0, (rows, width)
    library = bitsandbytes_functions()
    if kind == "nf4":
        codes, state = library.quantize_4bit(exact, blocksize=_BLOCK, quant_type="nf4")
    else:
        # Its kernels for CPUs and for GPUs take another level for 0.1 % of all numbers: those of CPUs, everywhere.
        if exact.is_cuda:
            exact = exact.cpu()
        levels = _table(kind, torch.float32, exact.device)
        codes, state = library.quantize_blockwise(exact, code=levels, blocksize=_BLOCK)
    form = Form(kind, weight.dtype, (1,) * rows, (_BLOCK,) * (width // _BLOCK))
    return Packed(codes.view(rows, -1), state.absmax.view(rows, -1), form).to(weight.device, weight.dtype)


def _pack_fp8(exact: Tensor, dtype: torch.dtype) -> Packed:
    """The largest of each block of 128 x 128 becomes 448, the largest of e4m3 (DeepSeek-V3, section 3.3)."""
    height, width = exact.shape
    rows, columns = Touched.by(0, height, FLOAT8_BLOCK).counts, Touched.by(0, width, FLOAT8_BLOCK).counts
    padded = in_blocks(exact)
    largest = padded.abs().amax((1, 3))
    scales = largest / torch.full_like(largest, _FP8_MOST)  # by a number a GPU would multiply with its reciprocal
    scales[scales == 0] = 1.0  # of zeros: 0 / 0
    codes = (padded / scales[:, None, :, None]).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
    codes = codes[:height, :width].contiguous()
    return Packed(codes.view(torch.uint8), scales, Form("fp8", dtype, rows, columns))


def in_blocks(x: Tensor) -> Tensor:
    """`[out, in]` -> `[n, 128, m, 128]`, with zeros at the ends."""
    padded = F.pad(x, (0, -x.shape[1] % FLOAT8_BLOCK, 0, -x.shape[0] % FLOAT8_BLOCK))  # of the last dim first
    return padded.unflatten(1, (-1, FLOAT8_BLOCK)).unflatten(0, (-1, FLOAT8_BLOCK))


def _pack_mxfp4(exact: Tensor, dtype: torch.dtype) -> Packed:
    """Blocks of 32 share the power of two below their largest, less 2, the exponent of the largest e2m1; numbers are
    rounded to the nearest, ties to even, and at most to 6 (OCP Microscaling Formats 1.0, section 6.3).
    """
    rows, width = exact.shape
    blocks = exact.view(rows, -1, MX_BLOCK)
    largest = blocks.abs().amax(-1)
    exponents = (torch.frexp(largest).exponent - 1 - 2).clamp(-127, 127)
    scales = torch.where(largest > 0, exponents + 127, 0).to(torch.uint8)
    form = Form("mxfp4", dtype, (1,) * rows, (MX_BLOCK,) * (width // MX_BLOCK))
    return Packed(_codes_of_e2m1(blocks / numbers_of_scales(scales).unsqueeze(-1)), scales, form)


def _pack_nvfp4(exact: Tensor, dtype: torch.dtype) -> Packed:
    """The largest of the matrix becomes 6 * 448, the largest of a block 6 (modelopt's rule). The factor is that of the
    whole matrix: a part of one cannot be packed by itself.
    """
    rows, width = exact.shape
    blocks = exact.view(rows, -1, NV_BLOCK)
    largest = blocks.abs().amax(-1)
    # Divided by tensors, as for fp8: by numbers a GPU would multiply with their reciprocals.
    factor = largest.amax() / torch.full_like(largest[0, 0], 6.0 * _FP8_MOST)
    factor = torch.where(factor > 0, factor, 1.0)
    scales = (largest / torch.full_like(largest, 6.0) / factor).to(torch.float8_e4m3fn).float()
    scales = torch.where(scales > 0, scales, 1.0)  # of zeros: 0 / 0
    # In float64: a quotient that is rounded to float32 may become a tie.
    quotients = blocks.double() / (scales * factor).double().unsqueeze(-1)
    form = Form("nvfp4", dtype, (1,) * rows, (NV_BLOCK,) * (width // NV_BLOCK))
    kept = with_factors(scales.to(torch.float8_e4m3fn), factor.expand(rows))
    return Packed(_codes_of_e2m1(quotients), kept, form)


def _codes_of_e2m1(blocks: Tensor) -> Tensor:
    """Bytes `[rows, width / 2]`: the nearest e2m1 of each number of `[rows, blocks, block]`, two a byte."""
    levels = torch.tensor(E2M1, device=blocks.device, dtype=blocks.dtype)
    middles = (levels[:-1] + levels[1:]) / 2  # exact in float32
    up = torch.arange(len(middles), device=blocks.device) % 2 == 1  # ties go to the even code: here the one above
    middles = torch.where(up, middles.nextafter(middles.new_zeros(())), middles)
    codes = torch.bucketize(blocks.abs(), middles) + 8 * (blocks < 0)
    pairs = codes.to(torch.uint8).view(len(blocks), -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


@functools.cache
def levels_of_int8() -> tuple[float, ...]:
    """-1, -126/127, ..., 1, and a second zero, float32, as the library computes them: not under the meta device."""
    return tuple(bitsandbytes_functions().create_linear_map(signed=True, total_bits=8).tolist())


@contextlib.contextmanager
def plain_weights(model: nn.Module) -> Iterator[None]:
    """Inside the block every packed matrix is a plain one, for code that reads weights."""
    packed = [(m, m.weight, m.frozen_weight) for m in model.modules() if isinstance(m, FrozenMatrix) and m.form]
    for module, _, frozen in packed:
        assert isinstance(frozen, Packed)
        module.weight = nn.Parameter(frozen.whole(), requires_grad=False)
    try:
        yield
    finally:
        for module, codes, _ in packed:
            module.weight = codes
