"""Products in float8 of matrices that are float8 already: as a checkpoint stores them, or as `fp8` quantised them.

Owns: the matrix whose codes and scales are the one set of numbers of both directions, and its form on a GPU. Does not
own: the rounding of inputs and gradients (`wings.quantized.float8`), reading codes (`wings.quantized.packed`), kernels
(`wings.quantized.float8_gpu`).

    W^[o,i] = scale of its block * e4m3 of its code         as stored: never rounded again
    y       = Q(x) W^^T                                     fp8_backward: x W^^T
    dx      = Q(g) W^

Scales may be any numbers, of blocks, of rows or of the whole matrix. Where a cut crosses a block both ranks have its
scale, and blocks of inputs and gradients are not cut: each rank multiplies the numbers of one process.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshlora.wings.quantized.float8_matrix import MOST_CHANGED, Float8, Float8Form, blocks_of, in_one_scale
from meshlora.wings.quantized.kinds import FLOAT8_BLOCK, STORED, TOKEN_BLOCK, Touched
from meshlora.wings.quantized.quantized import Packed, numbers_of_scales
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.slow_paths import UNPACKED_FOR_BACKWARD, take


@dataclass(frozen=True)
class StoredForm(Float8Form):
    """How stored codes and scales are a matrix. kind: one of `STORED`.

    Attributes:
        has_forward, has_backward: whether kernels of a GPU multiply by it in this direction.
    """

    has_forward: bool = False
    has_backward: bool = False

    def matrix(self, codes: Tensor, scales: Tensor) -> Packed:
        """The matrix, which rounds what it is multiplied with."""
        made = Stored if self.kind == STORED["fp8"] else StoredBackward
        return made(codes, scales, self, self.has_forward, self.has_backward)


class Stored(Float8):
    """W^ as it is stored, by which rounded inputs and rounded gradients are multiplied."""

    def returning(self, g: Tensor) -> tuple[Tensor, Tensor]:
        if not self.has_backward:
            take(UNPACKED_FOR_BACKWARD, g.device)
        return super().returning(g)


class StoredBackward(Stored):
    """The same, by which inputs are multiplied as they are."""

    def entering(self, x: Tensor) -> Tensor:
        return x


def multiplied_as_stored(packed: Packed, kind: str) -> Packed:
    """`packed`, of e4m3, with the products of `kind`, one of `STORED`. Codes and scales are the same tensors."""
    form = packed.form
    assert form.kind == "fp8", form.kind
    assert not form.is_transposed, form
    return StoredForm(kind, form.dtype, form.rows, form.columns).matrix(packed.codes, packed.scales)


@torch.no_grad()
def stored_for_kernels(packed: Packed, name: str) -> Packed:
    """`packed`, of `multiplied_as_stored`, of a matrix `name`, as the kernels of a GPU take it.

    Blocks whose scales are powers of two become one, as those of plain numbers do; others are cut to one size. Scales
    of rows are a factor of what the forward sums, and along the sum of the backward, which unpacks the matrix: it is
    said.

    Raises:
        UnsupportedError: no kernel takes these scales.
    """
    form, scales, codes = packed.form, numbers_of_scales(packed.scales), packed.codes
    assert isinstance(form, StoredForm), form
    (height, width), has_forward = packed.shape, form.kind == STORED["fp8"]
    is_one = bool((scales == scales.flatten()[0]).all())
    if not is_one and _are_powers(scales):
        blocks = Float8Form("float8", form.dtype, form.rows, form.columns)
        with_one, changed = in_one_scale(Packed(codes, scales, blocks))
        if changed <= MOST_CHANGED:
            codes, scales, is_one = with_one.codes, with_one.scales, True
    step = 0 if is_one else _step_of(form)
    rows: tuple[int, ...] = (1,) * height
    columns: tuple[int, ...] = (width,)
    if step:
        down, across = (blocks_of(sizes, scales.device)[::step] for sizes in (form.rows, form.columns))
        scales = scales.index_select(0, down).index_select(1, across)
        rows, columns = (Touched.by(0, size, step).counts for size in packed.shape)
    elif is_one:
        scales = scales.flatten()[:1].expand(height, 1).contiguous()
    elif len(form.columns) == 1 and has_forward:
        scales = scales.repeat_interleave(torch.tensor(form.rows, device=scales.device), 0)
    else:
        given = f"model.compute on a GPU of {name}, stored with scales of {_said(form)}"
        rule = f"its kernels take blocks of multiples of {TOKEN_BLOCK}, one scale of the matrix, or of each row forward"
        raise UnsupportedError(given, rule, "leave model.compute out: the matrix stays in float8")
    kept = dataclasses.replace(form, rows=rows, columns=columns, step=step, has_forward=has_forward)
    return dataclasses.replace(kept, has_backward=bool(is_one or step)).matrix(codes, scales)


def _step_of(form: StoredForm) -> int:
    """The side of the largest squares, of 128, 64 or 32, of which each has one scale; 0: there are none. A cut through
    blocks, and parts that are joined, leave blocks of several sizes."""
    ends = itertools.chain.from_iterable(list(itertools.accumulate(sizes))[:-1] for sizes in (form.rows, form.columns))
    step = math.gcd(FLOAT8_BLOCK, *ends)
    return step if step >= TOKEN_BLOCK else 0


def _are_powers(scales: Tensor) -> bool:
    """Whether all are powers of two, none subnormal."""
    mantissas, exponents = torch.frexp(scales)
    return bool(((mantissas == 0.5) & (exponents > -126)).all())


def _said(form: StoredForm) -> str:
    if len(form.columns) == 1:
        return "rows"
    return f"blocks of {max(form.rows)} x {max(form.columns)}"
