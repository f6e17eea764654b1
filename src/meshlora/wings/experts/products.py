"""LoRA on the experts of a layer: products grouped by expert, over rows sorted by expert.

Owns: forward and backward of one projection of all experts, `y[n] = x[n] W_e^T + s (x[n] A_e^T) B_e^T` with e the
expert of row n and W frozen; the sort and the row sums around them. Does not own: which rank
has which expert and how rows get there (`wings.experts.dispatch`), the module that holds the matrices.

Legend, beyond docs/notation.md: N rows, E local experts, each with its number of rows in `counts`; r the rank.
Nothing of the size of W is ever allocated, and no product is padded. An expert without rows costs nothing, and its
factors get gradients of zero. If W is packed, one expert's matrix is unpacked at a time.

One call for all experts reads on the device where the rows of each end, and the host need not know. Else one expert
comes after the other, and the host asks for their sizes.

With K adapters each expert's rows are sorted by adapter too: counts and factors are then those of `E K` pairs, an
expert's side by side, and the products with W remain per expert.

Factors are `[E, r, in]` and `[E, out, r]`, or `[1, ...]` if all experts share one. B is read as `[E, r, out]`: a B with
this memory layout (`empty(E, r, out).mT`) is used as it is, any other is transposed on each use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.layers.frozen import FewBits
from meshlora.wings.experts import row_counts
from meshlora.wings.experts.row_counts import RowCounts
from meshlora_ground.compat.torch_tensors import copy_each, scale_each
from meshlora_ground.slow_paths import EXPERTS_ONE_BY_ONE, take

# From this many rows per expert on, a CPU loops over the experts, so that all products of an expert find its rows in
# the cache; with fewer, W streams through the cache anyway and one call for all experts is cheaper.
ROWS_TO_LOOP = 16


@dataclass(frozen=True)
class Projection:
    """The frozen part of one projection of all experts.

    Attributes:
        weight: `[E, out, in]`, or `[E, in, out]` if `is_transposed`, packed or not. bias: `[E, out]`. scale: s of the
            adapter.
    """

    weight: Tensor | FewBits
    bias: Tensor | None = None
    scale: float = 1.0
    is_transposed: bool = False

    @property
    def forward_weight(self) -> Tensor | FewBits:
        """`[E, in, out]`, a view."""
        return self.weight if self.is_transposed else self.weight.mT


# --- rows ------------------------------------------------------------------------------------------------------------


def sort_by_expert(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, RowCounts]:
    """The T k slots of `top_k_index [T, k]`, sorted stably by expert, and their number for each expert.

    Returns:
        order: int64 `[T k]`; slot `order[n]` is the n-th row, that of token `order[n] // k`. counts: of E experts.
    """
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    return order, RowCounts.of_sorted(experts, num_experts)


def count_each(chosen: Tensor, number: int) -> Tensor:
    """int64 `[number]`: how often each of 0 ... number - 1 is in `chosen [N]`. For a `bincount` the host waits to learn
    the largest."""
    return chosen.new_zeros(number).scatter_add_(0, chosen, torch.ones_like(chosen))


def inverse_of(order: Tensor) -> Tensor:
    """`inverse[order[n]] = n`."""
    inverse = torch.empty_like(order)  # cheaper than a second sort
    inverse[order] = row_counts.numbers(len(order), order.device)
    return inverse


def by_row(weights: Tensor, places: Tensor) -> Tensor:
    """`[M, k]` -> `[M k]`: row `places[m, j]` gets `weights[m, j]`. With autograd."""
    rows = weights.new_empty(weights.numel())
    rows[places] = weights
    return rows


def sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """out[m] = sum_j weights[m,j] rows[places[m,j]]: rows `[N, H]`, places `[M, k]` -> `[M, H]`. No autograd.

    In the order of j, in one pass, with no copy of the rows and no atomics. The weights are rounded to their dtype.
    places `[M]` are the first ones of each m, whose rows lie one after another: any number of them.
    """
    if places.ndim == 1:
        if not len(rows):
            return rows.new_zeros(len(places), rows.shape[1])
        with torch.no_grad():
            return F.embedding_bag(row_counts.numbers(len(rows), rows.device), rows, places, mode="sum")
    if places.shape[1] == 1 and weights is None:
        return rows.index_select(0, places[:, 0])
    if not len(places):
        return rows.new_zeros(0, rows.shape[1])
    weights = None if weights is None else weights.to(rows.dtype).contiguous()
    # With places `[M, k]` torch would make these starts itself, on every call.
    starts, flat = row_counts.numbers(places.numel(), places.device, places.shape[1]), places.reshape(-1)
    weights = None if weights is None else weights.view(-1)
    with torch.no_grad():
        return F.embedding_bag(flat, rows, starts, mode="sum", per_sample_weights=weights)


# --- products --------------------------------------------------------------------------------------------------------


def can_group(x: Tensor, weight: Tensor) -> bool:
    """Whether `grouped_mm` takes `x [N, in]` and `weight [E, in, out]`, with the last two dims in either order."""
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float32) or x.device != weight.device:
        return False
    if x.is_cuda and (x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (8, 0)):
        return False
    aligned = 16 // x.element_size()  # `grouped_mm` takes strides of whole 16 bytes
    return all(
        t.data_ptr() % 16 == 0 and sorted(t.stride()[-2:])[0] == 1 and sorted(t.stride()[-2:])[1] % aligned == 0
        for t in (x, weight)
    )


def reads_sizes_on_device(dtype: torch.dtype) -> bool:
    """Whether one call for all experts, on this machine's GPU, reads there where the rows of each end.

    On others torch's call asks the host itself (aten/src/ATen/native/cuda/GroupedBlas.cpp).
    """
    is_there = dtype == torch.bfloat16 and torch.cuda.is_available()
    return is_there and torch.cuda.get_device_capability()[0] in (9, 10)


def grouped_product(x: Tensor, weight: Tensor | FewBits, counts: RowCounts) -> Tensor:
    """y[n] = x[n] weight[e]: x `[N, in]`, weight `[E, in, out]` -> `[N, out]`. counts: per expert, or per E K pair."""
    counts = counts.of_experts(len(weight))
    if not isinstance(weight, FewBits) and len(x) and can_group(x, weight):
        return F.grouped_mm(x, weight, offs=counts.ends)
    if not isinstance(weight, FewBits) and len(x):
        take(EXPERTS_ONE_BY_ONE, x.device)
    y = x.new_empty(len(x), weight.shape[2])
    each = counts.on_host
    # Views of y: each product writes its rows in place, and no row is copied.
    for e, (count, x_e, y_e) in enumerate(zip(each, x.split(each), y.split(each), strict=True)):
        if count:
            torch.mm(x_e, weight[e], out=y_e)
    return y


def _experts(weight: Tensor | FewBits, counts: RowCounts) -> list[int]:
    """The expert of each entry of `counts`."""
    each = counts.number // len(weight)
    return [place // each for place in range(counts.number)]


def forward_rows(
    x: Tensor,
    projection: Projection,
    counts: RowCounts,
    a: Tensor | None,
    b: Tensor | None,
    *,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`(y [N, out], z^T [r, N])` of `y = x W^T + s z B^T`, `z = x A^T`, without the bias; z is None without factors.

    x: `[N, in]`; with index int64 `[N]` the rows are `x[index]`.
    """
    weight = projection.forward_weight
    if a is None or b is None:
        return grouped_product(_gathered(x, index), weight, counts), None
    bt = _transposed(b)
    number = counts.number
    if _groups_factors(x, a, counts):
        x = _gathered(x, index)
        y = grouped_product(x, weight, counts)
        z = _factor_product(x, a.mT, counts)
        return y.add_(_factor_product(z, bt, counts), alpha=projection.scale), z.T
    # One factor for all experts: its product runs once, over all rows.
    shares_a, shares_b = (len(factor) < number for factor in (a, b))
    if shares_a:
        x, index = _gathered(x, index), None
    each, rows = counts.on_host, counts.num_rows
    y, zt = x.new_empty(rows, weight.shape[2]), x.new_empty(a.shape[1], rows)
    if shares_a:
        torch.mm(a[0], x.T, out=zt)
    pieces = zip(
        each,
        _by_expert(x, index, each),
        y.split(each),
        zt.split(each, 1),
        _experts(weight, counts),
        a.expand(number, -1, -1).unbind(),
        bt.expand(number, -1, -1).unbind(),
        strict=True,
    )
    for count, x_e, y_e, zt_e, e, a_e, bt_e in pieces:
        if not count:
            continue
        torch.mm(x_e, weight[e], out=y_e)
        if not shares_a:
            # z^T: a product with the few rows of A on the left is up to three times as fast as on the right.
            torch.mm(a_e, x_e.T, out=zt_e)
        if not shares_b:
            y_e.addmm_(zt_e.T, bt_e, alpha=projection.scale)
    if shares_b:
        y.addmm_(zt.T, bt[0], alpha=projection.scale)
    return y, zt


def backward_rows(
    g: Tensor,
    x: Tensor | None,
    zt: Tensor | None,
    projection: Projection,
    counts: RowCounts,
    a: Tensor | None,
    b: Tensor | None,
    *,
    index: Tensor | None = None,
    needs_dx: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`(dx, dA / s, dB / s)` of `forward_rows`, with g = dL/dy `[N, out]`; dA only if x is given, dB only if z^T is.

    dz_e = g_e B_e;  dx_e = g_e W_e + s dz_e A_e, `[N, in]`;  dA_e = s dz_e^T x_e;  dB_e = s g_e^T z_e
    The gradients of factors lack their s, and have the dtype of g: `finished` makes them whole, all in two passes.
    """
    g = g.contiguous()
    weight = projection.forward_weight.mT
    if a is None or b is None:
        return (grouped_product(g, weight, counts) if needs_dx else None), None, None
    bt = _transposed(b)
    dx = da = db = None
    if _groups_factors(g, a, counts):  # each product is one call for all experts
        dz = _factor_product(g, bt.mT, counts)
        if needs_dx:
            dx = grouped_product(g, weight, counts).add_(_factor_product(dz, a, counts), alpha=projection.scale)
        if x is not None:
            da = _factor_gradient(dz, _gathered(x, index), counts, len(a) == 1)
        if zt is not None:
            db = _factor_gradient(zt.T.contiguous(), g, counts, len(b) == 1).mT
        return dx, da, db
    dzt = _gradient_of_z(g, bt, counts)
    if needs_dx:
        dx = _gradient_of_x(g, dzt, projection, a, counts)
    if x is not None:
        da = _gradient_of_factor(dzt, x, len(a), counts, index)
    if zt is not None:
        db = _gradient_of_factor(zt, g, len(b), counts).mT
    return dx, da, db


def finished(
    gradients: Sequence[Tensor | None], scales: Sequence[float], dtypes: Sequence[torch.dtype]
) -> list[Tensor | None]:
    """Gradients of factors as `backward_rows` makes them, each with its s and its dtype."""
    there = [place for place, gradient in enumerate(gradients) if gradient is not None]
    found: list[Any] = list(gradients)
    wide = [place for place in there if found[place].dtype != dtypes[place]]
    if wide:
        copies = [torch.empty_like(found[place], dtype=dtypes[place]) for place in wide]
        copy_each(copies, [found[place] for place in wide])
        for place, copy in zip(wide, copies, strict=True):
            found[place] = copy
    scaled = [place for place in there if scales[place] != 1]
    if scaled:
        scale_each([found[place] for place in scaled], [scales[place] for place in scaled])
    return found


def _gradient_of_z(g: Tensor, bt: Tensor, counts: RowCounts) -> Tensor:
    """dz^T `[r, N]`, dz_e = g_e B_e. bt: B^T `[E, r, out]`, or `[1, r, out]` of all experts."""
    dzt = g.new_empty(bt.shape[1], len(g))
    if len(bt) < counts.number:
        return torch.mm(bt[0], g.T, out=dzt)
    each = counts.on_host
    for g_e, dzt_e, bt_e in zip(g.split(each), dzt.split(each, 1), bt.unbind(), strict=True):
        if len(g_e):
            torch.mm(bt_e, g_e.T, out=dzt_e)
    return dzt


def _gradient_of_x(g: Tensor, dzt: Tensor, projection: Projection, a: Tensor, counts: RowCounts) -> Tensor:
    """dx `[N, in]`, dx_e = g_e W_e + s dz_e A_e. a: `[E, r, in]`, or `[1, r, in]` of all."""
    weight, scale = projection.forward_weight.mT, projection.scale
    dx = g.new_empty(len(g), weight.shape[2])
    is_shared, each = len(a) < counts.number, counts.on_host
    pieces = zip(_experts(weight, counts), g.split(each), dzt.split(each, 1), dx.split(each), strict=True)
    for number, (e, g_e, dzt_e, dx_e) in enumerate(pieces):
        if len(g_e):
            torch.mm(g_e, weight[e], out=dx_e)
            if not is_shared:
                dx_e.addmm_(dzt_e.T, a[number], alpha=scale)
    return dx.addmm_(dzt.T, a[0], alpha=scale) if is_shared else dx


def _gradient_of_factor(zt: Tensor, x: Tensor, number: int, counts: RowCounts, index: Tensor | None = None) -> Tensor:
    """z_e^T x_e `[E, r, width]`, or `[1, r, width]` over all rows: dA / s of dz and x, (dB / s)^T of z and g.

    number: of factors, E or 1.
    """
    found = zt.new_empty(number, len(zt), x.shape[-1])
    if number < counts.number:
        torch.mm(zt, _gathered(x, index), out=found[0])
        return found
    each = counts.on_host
    for x_e, zt_e, found_e in zip(_by_expert(x, index, each), zt.split(each, 1), found.unbind(), strict=True):
        if len(x_e):
            torch.mm(zt_e, x_e, out=found_e)
        else:  # not every kernel writes a sum of no rows
            found_e.zero_()
    return found


def _gathered(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)


def _by_expert(x: Tensor, index: Tensor | None, each: list[int]) -> Iterable[Tensor]:
    """The rows of each expert; with an index they are gathered lazily, never all at once."""
    return x.split(each) if index is None else (x.index_select(0, part) for part in index.split(each))


def _transposed(b: Tensor) -> Tensor:
    """B `[E, out, r]` -> `[E, r, out]`, dense; B itself if it has this layout."""
    return b.mT.contiguous()


def _groups_factors(x: Tensor, a: Tensor, counts: RowCounts) -> bool:
    """Whether the low-rank products also run as one call for all experts."""
    is_aligned = a.shape[1] * x.element_size() % 16 == 0
    pays = not x.is_cpu or counts.num_rows < ROWS_TO_LOOP * counts.number
    groups = is_aligned and pays and counts.num_rows > 0 and can_group(x, a.mT)
    if not groups and counts.num_rows > 0:
        take(EXPERTS_ONE_BY_ONE, x.device)
    return groups


def _factor_product(x: Tensor, factor: Tensor, counts: RowCounts) -> Tensor:
    """`grouped_product`, or one plain product with a factor shared by all experts."""
    return x @ factor[0] if len(factor) < counts.number else grouped_product(x, factor, counts)


def _factor_gradient(left: Tensor, right: Tensor, counts: RowCounts, is_shared: bool) -> Tensor:
    """left_e^T right_e: `[N, r]`, `[N, width]` -> `[E, r, width]`, or `[1, r, width]` over all rows."""
    if is_shared and counts.number > 1:
        return (left.T @ right).unsqueeze(0)
    gradient = F.grouped_mm(left.T, right, offs=counts.ends)
    if not writes_empty_groups(gradient.device):
        gradient.masked_fill_(counts.is_empty.view(-1, 1, 1), 0)
    return gradient


def writes_empty_groups(device: torch.device) -> bool:
    """Whether `grouped_mm` over rows writes zeros for a group that has none of them.

    On GPUs of compute capability 9 it does. On later ones it writes what was in its registers (pytorch/pytorch issue
    172439, NVIDIA/cutlass issue 2674), and of others nobody has said.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] == 9
    return device.type == "meta"  # the planner's, which has no content


def bias_of_rows(bias: Tensor, counts: RowCounts, dtype: torch.dtype) -> Tensor:
    """`[E, out]` -> `[N, out]`."""
    repeats = counts.of_experts(len(bias)).sizes
    # With the size the host need not wait for the sum of the repeats.
    return bias.to(dtype).repeat_interleave(repeats, 0, output_size=counts.num_rows)
