"""Context parallelism without processes: who holds which tokens, the cut of activations, masks by rows, blocks."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from meshlora.comm.groups import Axis
from meshlora.layers.held_tokens import ContextCut, HeldTokens
from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.token_order import order_of_rows, token_order
from meshlora.run.run_data import check_fits
from meshlora.train.batch import IGNORED
from meshlora.train.collation import collate
from meshlora.train.packing import joined, with_positions
from meshlora.wings.context import context
from meshlora.wings.context.attention_parts import How
from meshlora.wings.context.borders import _kept, cut_argument
from meshlora.wings.context.context import ContextAttention, RowsOfMask, _compare
from meshlora_ground.compat import transformers_attention
from meshlora_ground.dataset import Sequence
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.for_each import for_each
from tests.unit.records import make_tokenizer

CPU = torch.device("cpu")
PACKED = [[13, 7, 1, 15], [2, 30, 3, 1]]  # documents and padding of two rows of 36


def held(rows: list[list[int]], *, size: int, rank: int, is_balanced: bool = True) -> HeldTokens:
    order = token_order(rows, size=size, is_balanced=is_balanced)
    return HeldTokens(order, Axis(size, rank, tuple(range(size)), None), CPU)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("is_balanced", [True, False])
def test_every_token_is_held_once_and_each_rank_has_as_many_in_ascending_order(size: int, is_balanced: bool) -> None:
    order = token_order(PACKED, size=size, is_balanced=is_balanced)
    assert (np.sort(order, axis=1) == np.arange(36)).all()
    for part in np.split(order, size, axis=1):
        assert (np.diff(part, axis=1) > 0).all()
    if not is_balanced:
        assert (order == np.arange(36)).all()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_causal_work_of_every_document_is_the_same_on_all_ranks(size: int) -> None:
    """A token's work is its place in its document."""
    lengths = [240, 96, 24]
    order = token_order([lengths], size=size)
    work = np.concatenate([np.arange(length) for length in lengths])[order[0]]
    of_ranks = [part.sum() for part in np.split(work, size)]
    assert max(of_ranks) - min(of_ranks) < 0.01 * max(of_ranks)


def test_rest_tokens_of_short_documents_go_round_the_ranks() -> None:
    order = token_order([[1] * 9 + [3]], size=3)
    assert [len(part) for part in np.split(order[0], 3)] == [4, 4, 4]


@pytest.mark.parametrize("length", [7, 2])
def test_rows_that_do_not_go_round_are_refused(length: int) -> None:
    with pytest.raises(UserError, match=f"rows of {length} tokens: cp=2 must divide .* takes 2 or more; pad them"):
        order_of_rows((1, length), None, size=2)


@pytest.mark.parametrize("rows", [PACKED, [[36], [36]]], ids=["packed", "alike"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_of_all_ranks_are_the_whole_along_any_dim_with_their_gradients(
    rows: list[list[int]], size: int
) -> None:
    x = torch.randn(2, 36, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 36, 5, dtype=torch.float64)
    total, seen = torch.zeros(()), torch.zeros(2, 36, 5, dtype=torch.float64)
    for rank in range(size):
        one = held(rows, size=size, rank=rank)
        part, factor = one.cut(x, 1), one.cut(weights, -2)
        for row in range(2):
            assert torch.equal(part[row], x[row, one.own[row]])
            seen[row, one.own[row]] += part[row].detach()
        total = total + (part * factor).sum()
    assert torch.equal(seen, x.detach())
    total.backward()
    assert torch.equal(x.grad, weights)  # type: ignore[arg-type]


def test_what_is_one_for_all_rows_is_cut_as_each_row_is() -> None:
    one = held(PACKED, size=3, rank=1)
    cos = torch.randn(1, 36, 4)
    assert torch.equal(one.cut(cos, -2), one.cut(cos.expand(2, -1, -1), -2))
    m_rope = torch.randn(3, 2, 36, 4)
    assert torch.equal(one.cut(m_rope, -2)[1], one.cut(m_rope[1], -2))
    assert torch.equal(one.cut(torch.arange(36).expand(3, 2, 36), -1)[2], one.own)
    context = ContextCut(Axis(3, 1, (0, 1, 2), None), CPU)
    context.next(token_order(PACKED, size=3))
    context.begin()
    for factor in (cos[..., :1], torch.randn(2, 36, 1)):  # beam's, of each query
        found = cut_argument(context.held, "attention_scaling", factor[:, None])
        assert torch.equal(found, one.cut(factor, 1)[:, None])


@pytest.mark.parametrize("rows", [PACKED, [[36], [36]]], ids=["packed", "alike"])
@pytest.mark.parametrize("is_balanced", [True, False])
def test_places_undo_the_order(rows: list[list[int]], is_balanced: bool) -> None:
    order = token_order(rows, size=3, is_balanced=is_balanced)
    one = held(rows, size=3, rank=0, is_balanced=is_balanced)
    if one.places is None:
        assert not is_balanced
    else:
        assert torch.equal(torch.from_numpy(order).gather(1, one.places), torch.arange(36).expand(2, -1))


def packed_positions(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """(position ids, number of the document) of each token."""
    positions = [torch.cat([torch.arange(length) for length in row]) for row in rows]
    numbers = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
    return torch.stack(positions), torch.stack(numbers)


def mask_of(kind: str, *, function: str = "causal") -> RowsOfMask:
    _, documents = packed_positions(PACKED)
    base = causal_mask_function if function == "causal" else sliding_window_causal_mask_function(5)
    given: dict[str, Any] = {
        "batch_size": 2,
        "q_length": 36,
        "kv_length": 36,
        "q_offset": 0,
        "kv_offset": 0,
        "mask_function": and_masks(base, packed_sequence_mask_function(documents)),
        "attention_mask": None,
        "allow_is_causal_skip": False,
        "dtype": torch.float64,
        "config": None,
        "use_vmap": False,
        "device": CPU,
    }
    if function == "padded":
        padding = torch.ones(2, 36, dtype=torch.bool)
        padding[0, 30:] = padding[1, 20:] = False
        given |= {"mask_function": sliding_window_causal_mask_function(5), "attention_mask": padding}
    found = AttentionMaskInterface()[f"meshlora-{kind}"](**given)
    assert isinstance(found, RowsOfMask)
    return found


@for_each("kind", ["sdpa", "eager"])
@for_each("function", ["causal", "window", "padded"])
@for_each("size", [2, 3])
def test_blocks_have_the_rows_of_the_whole_mask_and_no_key_that_is_seen_is_left_out(
    kind: str, function: str, size: int
) -> None:
    whole = mask_of(kind, function=function).whole
    seen = whole if whole.dtype == torch.bool else whole == 0
    for rank in range(size):
        one, taken = held(PACKED, size=size, rank=rank), torch.zeros(2, 36 // size, dtype=torch.int64)
        blocks = mask_of(kind, function=function).blocks(one)
        assert len(blocks) > 4  # of two rows, each with several
        for block in blocks:
            row = block.rows.start
            taken[row, block.own] += 1
            queries = one.own[row, block.own]
            assert torch.equal(block.mask[0, 0], whole[row, 0, queries][:, block.keys])
            assert seen[row, 0, queries].sum() == seen[row, 0, queries][:, block.keys].sum()
        assert (taken == 1).all()


def test_long_rows_are_computed_in_blocks_that_leave_out_later_keys() -> None:
    one = held([[4096]], size=2, rank=0)
    given = mask_of("sdpa").given | {
        "batch_size": 1, "q_length": 4096, "kv_length": 4096, "mask_function": causal_mask_function
    }  # fmt: skip
    blocks = RowsOfMask(AttentionMaskInterface()["sdpa"], given).blocks(one)
    work = sum((b.own.stop - b.own.start) * (b.keys.stop - b.keys.start) for b in blocks)
    assert work < 0.3 * 4096 * 4096  # of a rank: a quarter, and half of the blocks on the diagonal


def test_a_mask_of_an_earlier_forward_is_not_used_with_other_tokens() -> None:
    mask = mask_of("sdpa")
    mask.blocks(held(PACKED, size=2, rank=0))
    with pytest.raises(UnsupportedError, match="of an earlier forward than the last"):
        mask.blocks(held(PACKED, size=2, rank=0))


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (lambda mask: mask.dtype, "reads dtype of"),
        (lambda mask: mask[:, :, :, :4], "slices"),
        (lambda mask: ~mask, "inverts"),
        (lambda mask: torch.ones(2, 2) + mask, "calls add with"),
        (lambda mask: torch.where(mask, torch.ones(2), 0), "calls where with"),
    ],
    ids=["reads", "slices", "inverts", "adds", "where"],
)
def test_code_that_uses_its_mask_is_refused(does: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"its code {words} its attention mask"):
        does(mask_of("sdpa"))


def test_a_mask_that_is_sliced_to_all_of_it_is_the_same() -> None:
    mask = mask_of("sdpa")
    assert mask[:, :, slice(-0, None), :] is mask  # what gemma4 does with it


def test_arguments_with_something_of_each_token_are_cut_or_refused() -> None:
    running = ContextCut(Axis(2, 1, (0, 1), None), CPU)
    cos = torch.randn(2, 36, 4)
    assert cut_argument(running.held, "position_embeddings", cos) is cos  # nobody has cut this forward
    running.next(token_order(PACKED, size=2))
    running.begin()
    found = cut_argument(running.held, "position_embeddings", (cos, -cos))
    assert [tuple(part.shape) for part in found] == [(2, 18, 4)] * 2
    assert cut_argument(running.held, "scale", torch.ones(2, 3)).shape == (2, 3)
    with pytest.raises(UnsupportedError, match=r"takes memory \[2, 36, 7\]"):
        cut_argument(running.held, "memory", torch.ones(2, 36, 7))
    running.begin()  # the next forward is whole again
    assert cut_argument(running.held, "position_embeddings", cos) is cos


def test_tokens_of_a_rank_stay_as_they_are_where_a_decoder_makes_a_view_of_all() -> None:
    running = ContextCut(Axis(2, 0, (0, 1), None), CPU)
    x = torch.randn(1, 3, 5, dtype=torch.float64, requires_grad=True)
    assert _kept(running, x) is x  # of a forward that is not cut
    running.next(token_order([[6]], size=2))
    running.begin()
    kept = _kept(running, x)
    assert type(kept * 2) is Tensor
    viewed = kept.view((-1, 6, 5))
    assert type(viewed) is Tensor
    assert torch.equal(viewed, x)
    (grad,) = torch.autograd.grad((viewed * 3).sum(), x)
    assert (grad == 3).all()


@pytest.mark.parametrize(("family", "expected"), [("gpt2", True), ("llama", False), ("gpt_neox", False)])
def test_decoders_that_view_their_output_as_their_input_are_known_by_their_code(family: str, expected: bool) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(twin_config(family))
    assert transformers_attention.views_as_its_input(model.base_model) is expected


def sequence(length: int, first: int) -> Sequence:
    return Sequence(np.arange(first, first + length), np.ones(length, dtype=bool), {})


@pytest.mark.parametrize("size", [2, 3])
def test_labels_of_all_ranks_are_those_of_the_batch_each_once(size: int) -> None:
    rows = [[sequence(13, 0), sequence(7, 20)], [sequence(9, 50)]]
    whole = collate([joined(row) for row in rows], pad_token_id=0, row_multiple=size, token_multiple=2)
    length = whole.input_ids.shape[1]
    assert length % size == 0
    assert len(rows) * length // size % 2 == 0
    lengths = [[len(s.input_ids) for s in row] for row in rows]
    whole = with_positions(whole, lengths, [[0, 1], [2]])
    order = token_order([[*row, length - sum(row)] for row in lengths], size=size)
    parts = [whole.cut(order, rank=rank, size=size) for rank in range(size)]
    assert sum(part.num_trained_tokens for part in parts) == whole.num_trained_tokens
    assert [part.counts_rows for part in parts] == [True] + [False] * (size - 1)
    pairs = []
    for part in parts:
        on_host = part.to("cpu")
        assert on_host.trained is not None
        assert len(on_host.trained) == part.num_trained_tokens
        labels, tokens = part.own_labels.flatten(), part.held(part.tokens).flatten()
        assert (labels[on_host.trained] != IGNORED).all()
        pairs += list(zip(tokens[on_host.trained].tolist(), labels[on_host.trained].tolist(), strict=True))
    is_trained = whole.labels != IGNORED
    assert sorted(pairs) == sorted(
        zip(whole.tokens[is_trained].tolist(), whole.labels[is_trained].tolist(), strict=True)
    )


def test_rows_of_one_adapter_keep_their_own_tokens() -> None:
    whole = collate([sequence(9, 0), sequence(12, 50)], pad_token_id=0, row_multiple=2)
    part = whole.cut(token_order([[12], [12]], size=2), rank=1, size=2)
    second = part.rows(1, 2)
    assert second.order is not None
    assert torch.equal(second.own_labels, part.own_labels[1:2])
    assert second.num_trained_tokens == int((part.own_labels[1] != IGNORED).sum())


def eager_attention_forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    """An attention without softmax, of a family of its own."""
    return (query @ key.transpose(-1, -2) @ value).transpose(1, 2), None


class Linear(nn.Module):
    """Its forward has the globals of this file, where its eager attention is."""

    def __init__(self) -> None:
        super().__init__()
        self.meshlora_context = ContextAttention(ContextCut(Axis(2, 0, (0, 1), None), CPU), is_ring=True)

    def forward(self) -> None: ...


@pytest.mark.parametrize(
    ("implementation", "options", "unknown"),
    [
        ("eager", {}, "what its eager attention computes"),
        ("eager", {"position_bias": torch.zeros(1)}, "position_bias"),
        ("eager", {"dropout": 0.1}, "dropout"),
        ("sdpa", {"s_aux": torch.zeros(2)}, "s_aux"),
        ("sdpa", {"position_bias": torch.zeros(1), "memory": torch.zeros(1)}, "position_bias, memory"),
    ],
)
def test_attention_that_the_ring_does_not_know_is_refused_by_name(
    implementation: str, options: dict[str, Any], unknown: str
) -> None:
    module, part = Linear(), torch.randn(2, 2, 18, 4)
    module.meshlora_context.cut.next(token_order(PACKED, size=2))
    module.meshlora_context.cut.begin()
    attend: Any = AttentionInterface()[f"meshlora-{implementation}"]
    with pytest.raises(UnsupportedError, match=f"the ring with Linear: .* does not know {unknown}; leave out ring"):
        attend(module, part, part, part, mask_of(implementation), scaling=0.5, **options)


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {}), ("gemma2", {"softcap": 0.9}), ("gpt_oss", {"s_aux": torch.randn(4)})]
)
def test_eager_attention_is_compared_with_what_the_ring_computes(family: str, options: dict[str, Any]) -> None:
    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    module = Linear()
    module.num_key_value_groups, module.sinks = 2, options.get("s_aux")  # type: ignore[assignment]
    call = functools.partial(code.eager_attention_forward, module)
    query, pair, how = torch.randn(1, 4, 18, 8), torch.randn(1, 18, 2, 16), How(0.5, options.get("softcap"), 8)
    _compare(module, call, query, pair, how, {"scaling": 0.5, **options})
    for wrong in (dataclasses.replace(how, scale=0.51), dataclasses.replace(how, softcap=0.8)):
        with pytest.raises(UnsupportedError, match="does not know what its eager attention computes"):
            _compare(module, call, query, pair, wrong, {"scaling": 0.5, **options})


@for_each("function", ["causal", "window", "padded"])
@for_each("rows", [PACKED, [[36], [36]]], ids=["packed", "alike"])
@for_each("size", [2, 3])
def test_parts_show_each_query_the_keys_of_the_whole_mask_and_no_others(
    rows: list[list[int]], function: str, size: int
) -> None:
    """Gathered, and of each rank in the ring; rows that are dealt alike and see otherwise, together or each alone."""
    whole = mask_of("eager", function=function).whole[:, 0] == 0
    for rank, in_ring, alone in itertools.product(range(size), (False, True), (1, 128)):
        one = held(rows, size=size, rank=rank)
        with mock.patch.object(context, "_ALONE", alone):
            parts = mask_of("eager", function=function).parts(one, in_ring=in_ring)
        has_slices = any(part.mask is None for of_step in parts for part in of_step)
        assert has_slices or function != "causal" or (alone > 1 and one.is_uniform)
        for step, of_step in enumerate(parts):
            keys = torch.from_numpy(one.of_rank((rank - step) % size)) if in_ring else torch.arange(36).expand(2, -1)
            found = torch.zeros(2, 36 // size, keys.shape[1], dtype=torch.int64)
            for part in of_step:
                shape = part.queries.stop - part.queries.start, part.keys.stop - part.keys.start
                seen = torch.ones(1, *shape, dtype=torch.bool) if part.mask is None else part.mask[:, 0]
                found[part.rows, part.queries, part.keys] += seen.tril() if part.is_causal else seen
            for row in range(2):
                assert torch.equal(found[row], whole[row][one.own[row]][:, keys[row]].long())


def test_plain_causal_rows_are_cut_up_without_a_look_at_their_mask() -> None:
    given = mask_of("sdpa").given | {"batch_size": 1, "q_length": 96, "kv_length": 96}
    causal = RowsOfMask(lambda **_: pytest.fail("a mask is made"), given | {"mask_function": causal_mask_function})
    (gathered,) = causal.parts(held([[96]], size=2, rank=0), in_ring=False)
    assert [(p.queries, p.keys, p.is_causal) for p in gathered] == [
        (slice(0, 24), slice(0, 24), True),
        (slice(24, 48), slice(0, 72), False),
        (slice(24, 48), slice(72, 96), True),
    ]
    padded = RowsOfMask(
        AttentionMaskInterface()["sdpa"], causal.given | {"attention_mask": torch.arange(96)[None] < 80}
    ).parts(held([[96]], size=2, rank=0), in_ring=False)[0]
    assert [(p.queries, p.keys, p.is_causal) for p in padded] == [
        (slice(0, 24), slice(0, 24), True),
        (slice(24, 32), slice(0, 72), False),
        (slice(24, 32), slice(72, 80), True),
        (slice(32, 48), slice(0, 80), False),
    ]


@pytest.mark.parametrize(("topology", "multiple"), [("cp=3", "cp=3"), ("cp=3,tp=2,sp", "cp=3*tp=2 under sp")])
def test_sequences_that_padding_makes_too_long_are_refused(topology: str, multiple: str) -> None:
    """127 tokens fit in 128 positions, but not with padding to what both axes divide."""
    blueprint = make_blueprint(
        twin_config("llama", vocab_size=320), Topology.parse(topology), BaseOptions(dtype="float32")
    )
    check_fits(make_tokenizer(), blueprint, max_length=126)
    with pytest.raises(UserError) as caught:
        check_fits(make_tokenizer(), blueprint, max_length=127)
    assert caught.value.given == f"data.max_length=127, padded to a multiple of {multiple}"
    assert caught.value.way_out == "use at most 126"
