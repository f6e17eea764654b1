"""Attention in parts against plain attention, with gradients; which keys are seen as slices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from meshlora.comm.groups import Axis
from meshlora.verify.faults.registry import find
from meshlora.verify.ours import in_parts
from meshlora.wings.context import attention_parts
from meshlora.wings.context.attention_parts import How, Part, Seen, agrees, attend, groups_of, has_kernel
from meshlora_ground.compat import torch_fused
from tests.for_each import for_each

ALONE = Axis(1, 0, (0,), None)
EXACT = torch.float64


def documents(*lengths: int, window: int = 10**6) -> Tensor:
    """The mask `[S, S]` of documents in a row: each token sees those before it, at most `window` of them."""
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    back = place[:, None] - place
    return (number[:, None] == number) & (back >= 0) & (back < window)


def parts_of(mask: Tensor, own: np.ndarray, rows: slice = slice(None)) -> list[Part]:
    """The parts of one row's mask `[n, m]`."""
    found = []
    for queries, slices in groups_of(Seen.of_mask(mask, own)):
        if slices is None:
            found.append(Part(rows, queries, slice(0, mask.shape[1]), mask[queries][None, None]))
        found += [Part(rows, queries, keys, None, is_causal) for keys, is_causal in slices or ()]
    return found


def plain(query: Tensor, pair: Tensor, sinks: Tensor | None, mask: Tensor, how: How) -> Tensor:
    """In one piece, as models compute it. mask: bool `[B or 1, 1, n, m]`."""
    key, value = pair.transpose(1, 2).split([how.key_width, pair.shape[-1] - how.key_width], -1)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * how.scale
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value).transpose(1, 2)
    return (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2)


def both(
    parts: Sequence[Part], mask: Tensor, *, sinks: bool = False, softcap: float | None = None, widths: Any = (8, 8)
) -> float:
    """The worst difference of outputs and gradients. Two rows of a batch, 6 heads that share 2 of keys."""
    generator = torch.Generator().manual_seed(0)
    n, m = mask.shape[-2:]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=EXACT).requires_grad_()

    given: list[Any] = [draw(2, 6, n, widths[0]), draw(2, m, 2, sum(widths)), draw(6) if sinks else None]
    how = How(0.3, softcap, widths[0])
    found = attend(*given, [parts], how, ALONE)
    expected = plain(*given, mask if mask.ndim == 4 else mask[None, None], how)
    weights = torch.randn(expected.shape, generator=generator, dtype=EXACT)
    leaves = [tensor for tensor in given if tensor is not None]
    ours = torch.autograd.grad((found * weights).sum(), leaves)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves)
    off = [(a - b).detach().abs().max() for a, b in zip((found, *ours), (expected, *theirs), strict=True)]
    return float(torch.stack(off).max())  # nan, if one is


WHOLE = np.arange(37)
OPTIONS = {
    "plain": {},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 0.7},
    "both": {"sinks": True, "softcap": 0.7},
    "wide keys": {"widths": (8, 5)},
}


@for_each("options", OPTIONS.values(), ids=OPTIONS)
@for_each("mask", [documents(37), documents(20, 3, 14), documents(15, 22, window=5)], ids=["one", "three", "windows"])
def test_parts_are_plain_attention_with_its_gradients(mask: Tensor, options: dict[str, Any]) -> None:
    assert both(parts_of(mask, WHOLE), mask, **options) < 1e-13


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_few_queries_at_a_time_are_all_of_them(options: dict[str, Any]) -> None:
    mask = documents(20, 3, 14)
    with mock.patch.object(attention_parts, "_SCORE_BYTES", 8 * 12 * 20 * 3):
        assert both(parts_of(mask, WHOLE), mask, **options) < 1e-13
        assert both([Part(slice(None), slice(0, 37), slice(0, 37), mask[None, None])], mask, **options) < 1e-13


def test_a_proof_takes_few_queries_at_a_time_though_its_twin_has_few() -> None:
    """A fault in the second block of queries was none: those of a twin are all in the first."""
    mask, fault = documents(17), find("ring_last_queries_left_out")
    whole = [Part(slice(None), slice(0, 17), slice(0, 17), mask[None, None])]
    with in_parts(is_first=True):
        assert both(whole, mask, **OPTIONS["softcap"]) < 1e-13
        with fault.apply():
            assert both(whole, mask, **OPTIONS["softcap"]) > 0.01
    with fault.apply():
        assert both(whole, mask, **OPTIONS["softcap"]) < 1e-13


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rows_of_a_batch_may_have_parts_of_their_own_and_queries_may_see_nothing(options: dict[str, Any]) -> None:
    masks = torch.stack([documents(20, 3, 14), documents(9, 28, window=4)])
    masks[0, 30:] = False
    masks[1, :, 5] = False
    parts = [part for row in range(2) for part in parts_of(masks[row], WHOLE, slice(row, row + 1))]
    assert both(parts, masks.unsqueeze(1), **options) < 1e-13
    assert both([Part(slice(None), slice(0, 37), slice(0, 37), masks.unsqueeze(1))], masks.unsqueeze(1)) < 1e-13


def test_half_precision_is_merged_in_single_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    query, pair = torch.randn(1, 4, 64, 16, generator=generator), torch.randn(1, 64, 2, 32, generator=generator)
    mask, how = documents(64), How(0.25, None, 16)
    pieces = [Part(slice(None), slice(a, 64), slice(a - 8, a)) for a in range(8, 64, 8)]
    pieces += [Part(slice(None), slice(a, a + 8), slice(a, a + 8), None, True) for a in range(0, 64, 8)]
    exact = plain(query, pair, None, mask[None, None], how)
    found = attend(query.bfloat16(), pair.bfloat16(), None, [pieces], how, ALONE)
    at_once = attend(query.bfloat16(), pair.bfloat16(), None, [parts_of(mask, np.arange(64))], how, ALONE)
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() < 1.3 * (at_once - exact).norm()


def test_slices_are_found_in_masks() -> None:
    """Causal documents of a rank that has head and tail of each; keys of another rank; a window; what sees nothing."""
    mask, own = documents(20, 12), np.array([*range(5), *range(15, 20), *range(20, 23), *range(29, 32)])

    def of_rank(queries: np.ndarray, keys: np.ndarray, mask: Tensor, *, is_own: bool) -> list[Any]:
        numbers = np.arange(len(queries)) if is_own else np.full(len(queries), -1)
        return list(groups_of(Seen.of_mask(mask[queries][:, keys], numbers)))

    assert of_rank(own, own, mask, is_own=True) == [
        (slice(0, 10), [(slice(0, 10), True)]),
        (slice(10, 16), [(slice(10, 16), True)]),
    ]
    others = np.setdiff1d(np.arange(32), own)
    # The heads see nothing of the other's, the tails all; three queries of the second document are few.
    assert of_rank(own, others, mask, is_own=False) == [(slice(5, 10), [(slice(0, 10), False)]), (slice(13, 16), None)]
    whole = [(slice(0, 20), [(slice(0, 20), True)]), (slice(20, 32), [(slice(20, 32), True)])]
    assert list(groups_of(Seen.of_mask(mask, np.arange(32)))) == whole
    assert list(groups_of(Seen.of_mask(mask[own], own))) == [
        (slice(0, 5), [(slice(0, 5), True)]),
        (slice(5, 10), [(slice(0, 15), False), (slice(15, 20), True)]),
        (slice(10, 16), None),
    ]
    window = list(groups_of(Seen.of_mask(documents(32, window=6), np.arange(32))))
    assert window == [(slice(0, 6), [(slice(0, 6), True)]), (slice(6, 32), None)]
    ends = np.repeat([3, 5], 4)
    same_start = Seen(np.zeros(8, dtype=int), ends, ends + 1, np.full(8, -1))
    assert list(groups_of(same_start)) == [(slice(0, 4), [(slice(0, 4), False)]), (slice(4, 8), [(slice(0, 6), False)])]
    assert list(groups_of(Seen.of_mask(torch.zeros(9, 4, dtype=torch.bool), np.arange(9)))) == []


def test_neither_masks_nor_probabilities_nor_repeated_keys_are_kept() -> None:
    number, saved = 512, []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    query, pair = torch.randn(1, 8, number, 16).requires_grad_(), torch.randn(1, number, 2, 32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend(query, pair, None, [parts_of(documents(400, 112), np.arange(number))], How(0.25, None, 16), ALONE)
    out, sums = query.nbytes, 4 * 8 * number
    assert sum(saved) == query.nbytes + pair.nbytes + out + sums


def test_a_kernel_whose_sums_or_gradients_are_wrong_is_not_used() -> None:
    """On a GPU nothing public says what the kernel's sums are, so that it is tried once; here on a CPU."""
    tried = functools.partial(agrees.__wrapped__, torch.device("cpu"), torch.bfloat16, 16)
    assert tried()

    def other_sums(*given: Any, **how: Any) -> Any:
        out, sums = forward(*given, **how)
        return out, sums / 0.6931  # of powers of 2

    def other_keys(*given: Any, **how: Any) -> Any:
        of_query, of_key, of_value = back(*given, **how)
        return of_query, of_key.flip(1), of_value

    def none(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel")

    forward, back = torch_fused.attention_with_sums, torch_fused.attention_back
    wrong = ("attention_with_sums", other_sums), ("attention_back", other_keys), ("attention_with_sums", none)
    for name, function in wrong:
        with mock.patch.object(torch_fused, name, function):
            assert not tried(), function


def test_the_kernel_of_gpus_is_called_as_torch_declares_it() -> None:
    """Shapes alone, on the meta device: each of two heads of queries shares one of keys."""
    query = torch.empty(2, 4, 16, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    pair = torch.empty(2, 24, 2, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    parts = [
        Part(slice(None), slice(0, 16), slice(0, 8)),
        Part(slice(None), slice(0, 16), slice(8, 24), is_causal=True),
    ]
    assert has_kernel(query)
    assert not has_kernel(query.float())
    with mock.patch.object(torch_fused, "attention_back", wraps=torch_fused.attention_back) as back:
        out = attend(query, pair, None, [parts], How(0.3, None, 8), ALONE)
        out.sum().backward()
    assert back.call_count == 2
    assert out.shape == (2, 16, 4, 8)
    assert query.grad is not None
    assert pair.grad is not None
