"""LoRA on experts, grouped: against a loop over experts in plain autograd, float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from meshlora.wings.experts import products as grouped
from meshlora.wings.experts.products import (
    Projection,
    backward_rows,
    bias_of_rows,
    finished,
    forward_rows,
    inverse_of,
    sort_by_expert,
    sum_rows,
)
from meshlora.wings.experts.row_counts import RowCounts
from tests.for_each import for_each

IN, OUT, RANK = 6, 10, 2
COUNTS = {
    "even": [3, 3, 3, 3],
    "empty experts": [0, 5, 0, 7],
    "all rows on one": [0, 0, 12, 0],
    "no rows": [0, 0, 0, 0],
    "one expert": [9],
    "many rows": [40, 1, 90, 0],  # enough that one expert comes after the other
}


def assert_exact(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class GroupedLoraFunction(Function):
    """One projection by itself, as the MLP runs it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, projection: Projection, counts: list[int], a: Tensor | None, b: Tensor | None
    ) -> Tensor:
        x = x.contiguous()
        rows = RowCounts.known(counts, x.device)
        ctx.dtypes = [factor.dtype if factor is not None else None for factor in (a, b)]
        a, b = (factor if factor is None else factor.to(x.dtype) for factor in (a, b))
        y, zt = forward_rows(x, projection, rows, a, b)
        if projection.bias is not None:
            y += bias_of_rows(projection.bias, rows, y.dtype)
        _, _, _, needs_da, needs_db = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_da else None, zt if needs_db else None, a, b)
        ctx.projection, ctx.rows = projection, rows
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, zt, a, b = ctx.saved_tensors
        needs_dx = ctx.needs_input_grad[0]
        dx, *found = backward_rows(grads[0], x, zt, ctx.projection, ctx.rows, a, b, needs_dx=needs_dx)
        return dx, None, None, *finished(found, [ctx.projection.scale] * 2, ctx.dtypes)


@dataclass
class _Case:
    """One projection with its rows; `leaves` are what gets gradients."""

    projection: Projection
    counts: list[int]
    x: Tensor
    a: Tensor
    b: Tensor
    g: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.a, self.b

    def run(self) -> Tensor:
        return GroupedLoraFunction.apply(self.x, self.projection, self.counts, self.a, self.b)


def make_case(
    counts: list[int],
    *,
    is_transposed: bool = False,
    has_bias: bool = False,
    shared: str = "",
    dtype: torch.dtype = torch.float64,
    factor_dtype: torch.dtype | None = None,
    sizes: tuple[int, int, int] = (IN, OUT, RANK),
) -> _Case:
    (in_, out, rank), number, rows = sizes, len(counts), sum(counts)
    factor = factor_dtype or dtype
    weight = drawn(number, out, in_, seed=0, dtype=dtype)
    projection = Projection(
        weight.mT.contiguous() if is_transposed else weight,
        drawn(number, out, seed=1, dtype=dtype) if has_bias else None,
        scale=0.7,
        is_transposed=is_transposed,
    )
    return _Case(
        projection,
        counts,
        drawn(rows, in_, seed=2, dtype=dtype).requires_grad_(),
        drawn(1 if "a" in shared else number, rank, in_, seed=3, dtype=factor).requires_grad_(),
        drawn(1 if "b" in shared else number, out, rank, seed=4, dtype=factor).requires_grad_(),
        drawn(rows, out, seed=5, dtype=dtype),
    )


def by_loop(x: Tensor, projection: Projection, counts: list[int], a: Tensor | None, b: Tensor | None) -> Tensor:
    """One expert after the other, by autograd."""
    parts = []
    for e, rows in enumerate(x.split(counts)):
        weight = projection.weight[e].T if projection.is_transposed else projection.weight[e]
        y = F.linear(rows, weight, None if projection.bias is None else projection.bias[e])
        if a is not None and b is not None:
            a_e, b_e = a[e if len(a) > 1 else 0].to(x.dtype), b[e if len(b) > 1 else 0].to(x.dtype)
            y = y + projection.scale * (rows @ a_e.T) @ b_e.T
        parts.append(y)
    return torch.cat(parts)


def _check(case: _Case) -> None:
    y = case.run()
    expected = by_loop(case.x, case.projection, case.counts, case.a, case.b)
    assert_exact(y, expected)
    found = torch.autograd.grad(y, case.leaves, case.g)
    for actual, wanted in zip(found, torch.autograd.grad(expected, case.leaves, case.g), strict=True):
        assert_exact(actual, wanted)


@for_each("is_transposed", [False, True], ids=["out-in", "in-out"])
@for_each("shared", ["", "a", "b", "ab"])
@for_each("name", COUNTS)
def test_one_projection_is_a_loop_over_experts(name: str, shared: str, is_transposed: bool) -> None:
    _check(make_case(COUNTS[name], shared=shared, is_transposed=is_transposed, has_bias=True))


@for_each("rows", [0, 10**9], ids=["one after the other", "all in one call"])
@for_each("shared", ["", "a", "b", "ab"])
@for_each("counts", [[8, 0, 24], [0, 3, 0]])
def test_one_call_for_all_experts_is_a_loop_over_them_too(
    counts: list[int], shared: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "ROWS_TO_LOOP", rows)
    case = make_case(counts, shared=shared, dtype=torch.float32, sizes=(16, 24, 8))
    y = case.run()
    expected = by_loop(case.x, case.projection, counts, case.a, case.b)
    found, wanted = (torch.autograd.grad(t, case.leaves, case.g) for t in (y, expected))
    for ours, theirs in zip([y, *found], [expected, *wanted], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@for_each("shared", ["", "a", "b", "ab"])
def test_one_call_for_all_experts_does_not_ask_the_host_for_their_sizes(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "ROWS_TO_LOOP", 10**9)
    case = make_case([8, 0, 24], shared=shared, dtype=torch.float32, sizes=(16, 24, 8), has_bias=True)
    asked: list[Tensor] = []
    known = RowCounts.known
    # As those of tokens that are at home: the device knows them.
    monkeypatch.setattr(RowCounts, "known", lambda counts, device: RowCounts(known(counts, device).ends, sum(counts)))
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: asked.append(tensor))
    case.run().backward(case.g)
    assert not asked


def test_experts_without_rows_get_zeros_of_a_kernel_that_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    product = F.grouped_mm

    def leaves(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        found = product(left, right, offs=offs)
        if right.ndim == 2:
            found[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = torch.nan
        return found

    monkeypatch.setattr(F, "grouped_mm", leaves)
    case = make_case([0, 3, 0], dtype=torch.float32, sizes=(16, 24, 8))
    for gradient in torch.autograd.grad(case.run(), (case.a, case.b), case.g):
        assert not gradient[[0, 2]].any()
        assert gradient[1].isfinite().all()


@for_each("each", [1, 2, 3])
def test_rows_of_experts_are_those_of_their_adapters_together(each: int) -> None:
    counts = torch.randint(0, 4, (5, each), generator=torch.Generator().manual_seed(each))
    of_pairs = counts.flatten().tolist()
    ids = torch.arange(5 * each).repeat_interleave(counts.flatten())
    for rows in (RowCounts.known(of_pairs, "cpu"), RowCounts.of_sorted(ids, 5 * each)):
        assert rows.of_experts(5 * each) is rows
        assert rows.num_rows == len(ids)
        assert rows.of_experts(5).ends.tolist() == counts.sum(1).cumsum(0).tolist()
        assert rows.of_experts(5).on_host == rows.of_experts(5).sizes.tolist() == counts.sum(1).tolist()
        assert rows.on_host == of_pairs
        assert rows.is_empty.tolist() == [count == 0 for count in of_pairs]


def test_factor_that_lies_transposed_gets_a_gradient_that_lies_so_too() -> None:
    case = make_case(COUNTS["empty experts"])
    case.b = case.b.detach().mT.contiguous().mT.requires_grad_()
    _check(case)
    case.run().backward(case.g)
    assert case.b.grad is not None
    assert case.b.grad.stride() == case.b.stride()


def test_gradients_pass_gradcheck() -> None:
    case = make_case([2, 0, 3])
    assert torch.autograd.gradcheck(
        lambda x, a, b: GroupedLoraFunction.apply(x, case.projection, case.counts, a, b), case.leaves
    )


def test_experts_without_rows_get_zeros_not_none() -> None:
    # What is freed is filled with NaN first, so that memory which nobody wrote to shows.
    case = make_case([0, 3, 0])
    for _ in range(8):
        torch.full_like(case.a, torch.nan), torch.full_like(case.b, torch.nan)
    da, db = torch.autograd.grad(case.run(), (case.a, case.b), case.g)
    for gradient in (da, db):
        assert not gradient[[0, 2]].any()
        assert gradient[1].all()


def test_use_in_two_places_adds_up() -> None:
    case = make_case(COUNTS["even"])
    y = case.run()
    other = case.x.detach() * 2
    z = GroupedLoraFunction.apply(other, case.projection, case.counts, case.a, case.b)
    (da,) = torch.autograd.grad(y.sum() + z.sum(), case.a)
    plain = [by_loop(x, case.projection, case.counts, case.a, case.b).sum() for x in (case.x, other)]
    assert_exact(da, torch.autograd.grad(sum(plain), case.a)[0])


def test_gradient_that_is_a_view_is_taken() -> None:
    case = make_case(COUNTS["even"])
    da, expected = (
        torch.autograd.grad(y.sum(), case.a)[0]
        for y in (case.run(), by_loop(case.x, case.projection, case.counts, case.a, case.b))
    )
    assert_exact(da, expected)


@pytest.mark.parametrize("counts", [[8, 0, 24], [400, 0, 80]])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_half_precision_rounds_no_more_than_a_loop_and_gradients_stay_fp32(
    counts: list[int], is_transposed: bool
) -> None:
    case = make_case(
        counts, is_transposed=is_transposed, dtype=torch.bfloat16, factor_dtype=torch.float32, sizes=(16, 24, 8)
    )
    y = case.run()
    found = torch.autograd.grad(y, case.leaves, case.g)
    assert y.dtype == torch.bfloat16
    assert [t.dtype for t in found] == [torch.bfloat16, torch.float32, torch.float32]
    wide = replace(case.projection, weight=case.projection.weight.double())
    leaves = [t.detach().bfloat16().double().requires_grad_() for t in case.leaves]
    exact = by_loop(leaves[0], wide, counts, leaves[1], leaves[2])
    plain = by_loop(case.x, case.projection, counts, case.a, case.b)
    wanted = [exact, *torch.autograd.grad(exact, leaves, case.g.double())]
    loop = [plain, *torch.autograd.grad(plain, case.leaves, case.g)]
    for ours, theirs, truth in zip([y, *found], loop, wanted, strict=True):
        noise = (theirs.double() - truth).abs().max()
        assert (ours.double() - truth).abs().max() <= 2 * noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_frozen_base_is_a_loop_over_experts_too(dtype: torch.dtype) -> None:
    case = make_case([8, 0, 24], dtype=dtype, sizes=(16, 24, 8))
    y = GroupedLoraFunction.apply(case.x, case.projection, case.counts, None, None)
    expected = by_loop(case.x, case.projection, case.counts, None, None)
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    (dx,), (wanted,) = (torch.autograd.grad(t, case.x, case.g) for t in (y, expected))
    torch.testing.assert_close(y, expected, rtol=rtol, atol=rtol)
    torch.testing.assert_close(dx, wanted, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("counts", [[0, 0, 0], [8, 0, 24]])
@pytest.mark.parametrize("has_factors", [False, True])
def test_grouped_kernels_take_no_rows_and_gradients_that_are_views(counts: list[int], has_factors: bool) -> None:
    case = make_case(counts, dtype=torch.float32, sizes=(16, 24, 8))
    factors = (case.a, case.b) if has_factors else (None, None)
    y = GroupedLoraFunction.apply(case.x, case.projection, counts, *factors)
    expected = by_loop(case.x, case.projection, counts, *factors)
    (dx,), (wanted,) = (torch.autograd.grad(t.sum(), case.x) for t in (y, expected))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, wanted, rtol=1e-5, atol=1e-4)


# --- what is never made and never kept -------------------------------------------------------------------------------


class _Made(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator makes, views not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not any(a.alias_info for a in func._schema.returns):
            self.largest = max(self.largest, result.numel())
        return result


def saved_by(function: Any) -> tuple[Tensor, list[Tensor]]:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = function()
    return y, kept


def test_nothing_of_the_size_of_the_weight_is_made_and_it_gets_no_gradient() -> None:
    case = make_case([1, 0, 2, 1], sizes=(16, 24, 2))
    case.projection.weight.requires_grad_()
    with _Made() as made:
        case.run().sum().backward()
    assert case.projection.weight.grad is None
    assert 0 < made.largest < case.projection.weight.numel() / 4


def test_only_the_gradient_of_a_needs_x() -> None:
    case = make_case(COUNTS["even"])
    holds_x = [
        any(t.data_ptr() == case.x.data_ptr() for t in saved_by(run)[1])
        for run in (
            case.run,
            lambda: GroupedLoraFunction.apply(case.x, case.projection, case.counts, case.a.detach(), case.b),
            lambda: GroupedLoraFunction.apply(case.x, case.projection, case.counts, None, None),
        )
    ]
    assert holds_x == [True, False, False]


# --- rows ------------------------------------------------------------------------------------------------------------


def test_sort_is_stable_and_counts_every_expert() -> None:
    order, counts = sort_by_expert(torch.tensor([[2, 0], [0, 4], [2, 0]]), 5)
    assert order.tolist() == [1, 2, 5, 0, 4, 3]
    assert counts.on_host == counts.sizes.tolist() == [3, 0, 2, 0, 1]
    assert counts.is_empty.tolist() == [False, True, False, True, False]
    assert order[inverse_of(order)].tolist() == list(range(6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_weights", [False, True])
def test_sum_over_rows_takes_them_in_the_order_of_choices(dtype: torch.dtype, has_weights: bool) -> None:
    rows = drawn(12, 5, seed=0, dtype=dtype)
    places = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(4, 3)
    weights = drawn(4, 3, seed=1, dtype=dtype) if has_weights else None
    terms = rows[places].double() * (1 if weights is None else weights.double().unsqueeze(2))
    rtol = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(sum_rows(rows, places, weights).double(), terms.sum(1), rtol=rtol, atol=2 * rtol)
    assert torch.equal(sum_rows(rows, places[:, :1]), rows[places[:, 0]])
