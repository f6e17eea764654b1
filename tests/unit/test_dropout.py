"""Masks of dropout: a function of seed, step, module, token and feature; and the layers that apply them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshlora
from meshlora.comm.groups import Axis
from meshlora.layers.dropout import TokenDropout, input_features
from meshlora.layers.held_tokens import ContextCut
from meshlora.layers.linear import ParallelLinear
from meshlora.layers.products import Entered, LoraLinearFunction
from meshlora.layers.tokens import ForwardTokens, Mask, Segment, Share
from meshlora.plan.layout import Layout, Split
from meshlora.plan.own_dropouts import EXACT_DROPOUTS, check_dropouts, handle_dropout, is_exact_module
from meshlora.plan.rules import LinearRule
from meshlora.train.collation import collate
from meshlora_ground import masks as dropout
from meshlora_ground.dataset import Sequence
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.masks import keep_mask, mask_key, numbers_by_content, token_numbers
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.blueprints import build_meta
from tests.for_each import for_each

ALONE = Axis(1, 0, (0,), None)
TOKENS, FEATURES = token_numbers(torch.arange(8), 64).flatten(), torch.arange(256)  # [512], [256]
KEY = mask_key(3, 5, "model.layers.0.mlp")
# Worked out in whole numbers of Python, from the words of `meshlora_ground.masks`.
FIXED_KEY, FIXED_BITS = 0xE8A3A2741FD26B91, ["00101000", "11111000", "01100011", "10001111"]


def _kept(key: int = KEY, tokens: Tensor = TOKENS, features: Tensor = FEATURES, p: float = 0.1) -> Tensor:
    return keep_mask(key, tokens, features, p)


# --- the function


def test_tokens_are_numbered_by_their_sequence_on_whichever_side_it_is_filled_up() -> None:
    """And rows of the same tokens in another order, or with one more, are others."""
    ids = torch.tensor([[5, 6, 7, 8]])
    alone = numbers_by_content(ids, None)[0]
    rows = torch.tensor([[5, 6, 7, 8, 0, 0], [0, 0, 5, 6, 7, 8], [6, 5, 7, 8, 0, 0], [5, 6, 7, 8, 0, 9]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]])
    found = numbers_by_content(rows, mask)
    assert torch.equal(found[0, :4], alone)
    assert torch.equal(found[1, 2:], alone)
    assert (alone & 0xFFFFFFFF).tolist() == [0, 1, 2, 3]
    places = (found >> 32)[:, 3].tolist()
    assert all(0 <= place < 2**31 for place in places)
    assert len(set(places[1:])) == 3


def test_masks_are_those_of_every_other_day() -> None:
    """A checkpoint is resumed by another version, on another machine: the bits must not change."""
    assert mask_key(3, 5, "model.layers.0.mlp") == FIXED_KEY
    tokens = torch.tensor([0, 1, 2**32, 7 * 2**32 + 1000])
    found = keep_mask(FIXED_KEY, tokens, torch.tensor([0, 1, 2, 3, 4, 5, 6, 4095]), 0.5)
    assert ["".join("01"[int(bit)] for bit in row) for row in found] == FIXED_BITS


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p_in_all_in_each_row_and_in_each_column(p: float) -> None:
    dropped = (~_kept(p=p)).double()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(dropped.mean() - p) < 4.5 * deviation / dropped.numel() ** 0.5
    for dim in (0, 1):
        gaps = (dropped.mean(dim) - p) / (deviation / dropped.shape[dim] ** 0.5)
        assert gaps.abs().max() < 6
        assert 0.7 < gaps.square().mean() < 1.35  # as much spread as independent draws have


def test_nothing_is_dropped_at_rate_0() -> None:
    assert _kept(p=0.0).all()


def test_masks_of_other_steps_seeds_modules_rows_and_columns_are_unrelated() -> None:
    keys = [mask_key(*words) for words in itertools.product((0, 1), (0, 1, 2), ("a", "a.lora_dropout", "b"))]
    keys += [KEY ^ 1, KEY ^ 2**32, KEY + 1]
    masks = torch.stack([_kept(key, p=0.5).flatten().double() * 2 - 1 for key in keys])
    _assert_unrelated(masks)
    for rows in (_kept(p=0.5), _kept(p=0.5).T):
        _assert_unrelated(rows.double() * 2 - 1)


def test_tokens_that_differ_in_one_bit_or_have_sequence_and_position_swapped_are_unrelated() -> None:
    tokens = torch.tensor([0, *(2**bit for bit in range(62)), 3 * 2**32 + 5, 5 * 2**32 + 3])
    _assert_unrelated(_kept(tokens=tokens, features=torch.arange(4096), p=0.5).double() * 2 - 1)


def test_rows_whose_first_words_collide_still_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    words = dropout._row_words
    monkeypatch.setattr(dropout, "_row_words", lambda *args: words(*args) * torch.tensor([[0], [1]], dtype=torch.int32))
    _assert_unrelated(_kept(tokens=TOKENS[:64], features=torch.arange(4096), p=0.5).double() * 2 - 1)


def _assert_unrelated(rows: Tensor) -> None:
    """Rows of ±1: no two of them, also not shifted against each other by one, agree more than chance does."""
    for other in (rows, rows.roll(1, 1)):
        products = rows @ other.T / rows.shape[1] ** 0.5
        products = products - products.diag().diag() if other is rows else products
        assert products.abs().max() < 6.5


def test_each_element_is_that_of_any_part_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _kept()
    rows, columns = torch.randperm(512)[:100], torch.randperm(256)[:50]
    assert torch.equal(_kept(tokens=TOKENS[rows], features=FEATURES[columns]), whole[rows][:, columns])
    monkeypatch.setattr(dropout, "_BLOCK", 1000)  # a few rows at a time, the last ones fewer
    assert torch.equal(_kept(), whole)


def test_number_of_a_token_is_its_place_and_position_whatever_it_is_batched_with() -> None:
    one, other = (Sequence(torch.ones(n).int().numpy(), torch.ones(n).bool().numpy()) for n in (3, 5))
    alone = collate([one], pad_token_id=0, places=[6])
    beside = collate([other, one], pad_token_id=0, places=[1, 6], token_multiple=16)
    assert torch.equal(alone.tokens[0], beside.tokens[1, :3])
    assert len(set(beside.tokens.flatten().tolist())) == beside.tokens.numel()
    assert beside.tokens[1].tolist() == [6 * 2**32 + position for position in range(beside.tokens.shape[1])]
    assert collate([], pad_token_id=0).tokens.shape == (1, 2)


# --- layers


def _rule(split: Split = Split.WHOLE, features: int = 6) -> LinearRule:
    layout = Layout.plain(features) if split is not Split.WHOLE else None
    return LinearRule("up", split, features, 7, has_bias=True, layout=layout)


def _linear(tokens: ForwardTokens, p: float = 0.3) -> ParallelLinear:
    generator = torch.Generator().manual_seed(0)
    linear = ParallelLinear(_rule(), ALONE, scatters_tokens=False, dtype=torch.float64, device="cpu")
    factors = {n: torch.randn(s, generator=generator).double() for n, s in (("A", (2, 6)), ("B", (7, 2)))}
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).double()
    linear.add_adapter("default", factors, scaling=0.5)
    linear.set_dropout("default", p, tokens)
    linear.active = "default"
    return linear.requires_grad_()


def _x(rows: int = 8) -> Tensor:
    return torch.randn(2, rows // 2, 6, generator=torch.Generator().manual_seed(1)).double().requires_grad_()


def test_gradients_of_a_lora_linear_with_dropout_pass_gradcheck() -> None:
    x, weight, a, b = (torch.randn(*shape).double() for shape in ((2, 3, 5), (7, 5), (2, 5), (7, 2)))
    mask = Mask(KEY, torch.arange(6), torch.arange(5), 0.4)
    assert not _kept(tokens=mask.tokens, features=mask.features, p=0.4).all()
    x, a, b = (t.requires_grad_() for t in (x, a, b))
    whole = [Segment(0, 6, 0.5, mask)]
    assert torch.autograd.gradcheck(
        lambda *t: LoraLinearFunction.apply(t[0], None, weight, None, whole, Entered(t[0]), *t[1:]), (x, a, b)
    )
    drop = TokenDropout("drop", 0.4, tokens := ForwardTokens(ALONE, sp=False))
    with tokens.at(0, 0, torch.arange(6).view(2, 3)):
        assert torch.autograd.gradcheck(drop, (x,))


def test_only_the_adapters_term_sees_dropout_and_what_is_kept_is_scaled() -> None:
    tokens = ForwardTokens(ALONE, sp=False)
    linear, x = _linear(tokens), _x()
    numbers = token_numbers(torch.tensor([4, 1]), 4)
    with tokens.at(7, 2, numbers):
        found = linear(x)
    keep = keep_mask(mask_key(7, 2, "up.lora_dropout"), numbers.flatten(), torch.arange(6), 0.3).view(x.shape)
    a, b = linear.factors("default")
    expected = x @ linear.weight.T + linear.bias + 0.5 * (x * keep / 0.7) @ a.T @ b.T
    assert torch.allclose(found, expected, rtol=1e-12)
    linear.eval()
    expected = x @ linear.weight.T + linear.bias + 0.5 * x @ a.T @ b.T
    assert torch.allclose(linear(x), expected, rtol=1e-12)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_cp_with_as_many_tokens_as_there_are_sequences_has_the_masks_of_its_tokens(rank: int) -> None:
    """Two sequences of two tokens: one token of each on a rank, and not the first token of each on both."""
    cut = ContextCut(Axis(2, rank, (0, 1), None), torch.device("cpu"))
    cut.next(np.array([[0, 1], [0, 1]]))
    cut.begin()
    tokens = ForwardTokens(ALONE, sp=False, context=cut)
    numbers = token_numbers(torch.arange(2), 2)
    with tokens.at(0, 0, numbers):
        (part,) = tokens.parts("up", 2)
    assert part.tokens.tolist() == numbers[:, rank].tolist()


def _run(recomputes: bool, step: int = 0) -> list[Tensor]:
    tokens = ForwardTokens(ALONE, sp=False)
    linear = _linear(tokens)
    model = nn.Sequential(linear, TokenDropout("drop", 0.2, tokens))
    x = _x()
    with tokens.at(0, step, token_numbers(torch.arange(2), 4)):
        y = checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
        y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in linear.parameters() if p.grad is not None)]  # type: ignore[list-item]


def test_masks_are_the_same_when_activations_are_computed_once_more() -> None:
    plain, again = _run(False), _run(True)
    assert len(plain) > 4
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert not torch.equal(_run(False)[0], _run(False, step=1)[0])


def test_no_mask_is_saved() -> None:
    sizes: list[int] = []

    def saved(p: float, makes: Any) -> int:
        tokens = ForwardTokens(ALONE, sp=False)
        sizes.clear()
        with tokens.at(0, 0, token_numbers(torch.arange(2), 4)), torch.autograd.graph.saved_tensors_hooks(keep, drop):
            makes(tokens, p)(_x())
        return sum(sizes)

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    def drop(tensor: Tensor) -> Tensor:
        return tensor

    def plain(tokens: ForwardTokens, p: float) -> ParallelLinear:
        return _linear(tokens, p)

    assert saved(0.3, plain) == saved(0.0, plain) > 0
    assert saved(0.3, lambda tokens, p: TokenDropout("drop", p, tokens)) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_under_sp_a_module_between_regions_has_its_ranks_part_of_the_tokens(rank: int) -> None:
    numbers = token_numbers(torch.tensor([2, 5]), 4)
    tokens = ForwardTokens(Axis(2, rank, (0, 1), None), sp=True)
    with tokens.at(0, 0, numbers):
        for rows, expected in ((8, numbers.flatten()), (4, numbers[rank])):
            (part,) = tokens.parts("m", rows)
            assert torch.equal(tokens.mask("m", 0.1, part, FEATURES).tokens, expected)
        with pytest.raises(UnsupportedError, match="16 rows for 8 tokens"):
            tokens.parts("m", 16)


def test_after_pooling_a_sequence_has_the_mask_of_its_first_token() -> None:
    numbers = token_numbers(torch.tensor([2, 5, 9]), 4)
    tokens = ForwardTokens(ALONE, sp=False)
    with tokens.of([Share(None, numbers[:2]), Share("b", numbers[2:])], [None, "b"]):
        parts = tokens.parts("pooler.dense", 3)
        assert [(part.start, part.stop, part.tokens.tolist()) for part in parts] == [
            (0, 2, numbers[:2, 0].tolist()),
            (2, 3, numbers[2:, 0].tolist()),
        ]
        with pytest.raises(UnsupportedError, match="6 rows for 12 tokens"):
            tokens.parts("m", 6)


def test_features_of_an_input_that_is_split_are_those_of_the_whole_matrix() -> None:
    ranks = [Axis(2, rank, (0, 1), None) for rank in range(2)]
    rule = LinearRule("down", Split.ROW, 12, 7, has_bias=False, layout=Layout.plain(4, 3))
    assert [input_features(rule, rank).tolist() for rank in ranks] == [list(range(6)), list(range(6, 12))]
    assert input_features(_rule(Split.COLUMN), ranks[1]).tolist() == list(range(6))


def test_training_with_dropout_without_saying_of_which_tokens_is_an_error() -> None:
    tokens = ForwardTokens(ALONE, sp=False)
    linear, module = _linear(tokens), TokenDropout("drop", 0.1, tokens)
    for layer in (linear, module):
        with pytest.raises(UserError, match="nobody has said which they are"):
            layer(_x())
        layer.eval()(_x())
    with tokens.at(0, 0, torch.arange(8)):
        pass
    with pytest.raises(UserError, match="nobody has said"):
        linear.train()(_x())


def test_an_adapter_that_comes_to_a_model_in_evaluation_has_no_dropout_there() -> None:
    model = meshlora.load(twin_config("llama")).eval()
    config = LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    meshlora.add_adapter(model, "one", config)
    meshlora.set_adapter(model, "one")
    ids = torch.ones(1, 4, dtype=torch.int64)
    found = model(input_ids=ids).logits
    with pytest.raises(UserError, match="nobody has said"):
        model.train()(input_ids=ids)
    with model.meshlora.dropout.at(0, 0, token_numbers(torch.tensor([0]), 4)):
        assert not torch.equal(model(input_ids=ids).logits, found)


# --- which dropouts there are


@for_each(("family", "field"), [(f, field) for f, fields in EXACT_DROPOUTS.items() for field in fields])
def test_each_field_of_the_table_is_the_rate_of_its_modules_and_of_no_other(family: str, field: str) -> None:
    model, _ = build_meta(twin_config(family, **{field: 0.25}), Topology(), dtype=torch.float32)
    dropping = {name for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0}
    ends = EXACT_DROPOUTS[family][field]
    assert all(is_exact_module(family, name) for name in dropping)
    for end in ends:
        assert any(name.endswith(end.rpartition("*")[2]) for name in dropping), end
    assert all(any(name.endswith(end.rpartition("*")[2]) for end in ends) for name in dropping)


def test_dropout_that_no_field_names_is_refused_by_its_module() -> None:
    model, _ = build_meta(twin_config("llama"), Topology(), dtype=torch.float32)
    check_dropouts(model)
    model.model.layers[0].mlp.of_its_own = nn.Dropout(0.25)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.of_its_own: dropout 0\.25"):
        check_dropouts(model)


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("gpt2", "attn_pdrop"),
        ("phi", "resid_pdrop"),  # one module is called twice
        ("opt", "dropout"),  # F.dropout
        ("starcoder2", "residual_dropout"),
        ("llama", "attention_dropout"),
    ],
)
def test_dropout_that_is_not_exact_is_refused_by_name_and_can_be_disabled_alone(family: str, field: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{field}=0.1.*disable_dropout: unsupported"):
        build_meta(twin_config(family, **{field: 0.1}), Topology(), dtype=torch.float32)
    config = twin_config(family, **{field: 0.1})
    handle_dropout(config, disable="unsupported")
    assert getattr(config, field) == 0


def test_exact_dropouts_stay_where_only_the_others_are_disabled() -> None:
    rates = {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.3}
    model = meshlora.load(twin_config("gpt2", **rates), disable_dropout="unsupported")
    found = {name: m.p for name, m in model.named_modules() if isinstance(m, TokenDropout)}
    assert found == {
        "transformer.drop": 0.3,
        **{f"transformer.h.{n}.{end}": 0.2 for n in (0, 1) for end in ("attn.resid_dropout", "mlp.dropout")},
    }
    off = meshlora.load(twin_config("gpt2", **rates), disable_dropout=True)
    assert not any(isinstance(module, TokenDropout) for module in off.modules())
    with pytest.raises(UnsupportedError, match="nothing would be left"):
        meshlora.load(twin_config("gpt2", resid_pdrop=1.0))
