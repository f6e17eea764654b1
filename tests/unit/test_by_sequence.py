"""Attention of packed rows runs one sequence at a time, for the values and gradients of the whole mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.layers.row_lengths import rows_of
from meshlora.train.batch import Batch
from meshlora.train.collation import collate
from meshlora.train.losses import batch_log_probabilities
from meshlora.train.packing import joined, with_positions
from meshlora.wings.packed_rows import varlen
from meshlora.wings.packed_rows.by_sequence import PackedMask, keep_apart
from meshlora.wings.packed_rows.row_masks import read_positions_in_masks
from meshlora_ground.compat import transformers_attention
from meshlora_ground.dataset import Sequence
from meshlora_ground.float64 import lift
from meshlora_judge.twin import twin_config
from tests.for_each import for_each

_LENGTHS = [[13, 5, 3], [3, 11, 7]]


def _model(family: str, attention: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        twin_config(family), dtype=torch.float64, attn_implementation=attention, experts_implementation="eager"
    )
    read_positions_in_masks(model)
    return model


def _run(model: Any, lengths: list[list[int]] | None, of_rows: list[list[int]] | None = None) -> list[Tensor]:
    """Logits of two packed rows, and the gradients of all parameters. of_rows: what is in them, default `_LENGTHS`."""
    ids = torch.randint(3, model.config.vocab_size, (2, 21), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in of_rows or _LENGTHS])
    model.zero_grad()
    with lift(), rows_of(model, lengths):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        logits.square().sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


# Windows; windows and sinks, whose masks the model makes without positions; latent attention; soft caps.
@for_each(
    ("family", "attention"),
    [("llama", "sdpa"), ("qwen3", "eager"), ("gemma3_text", "sdpa"), ("gpt_oss", "eager"), ("gemma2", "eager")],
)
@for_each(
    ("of_rows", "calls"),
    [(_LENGTHS, 6), ([[7, 7, 7], [7, 7, 7]], 1), ([[21], [21]], 1)],
    ids=["several", "of one length", "one a row"],
)
def test_without_the_whole_mask_they_have_its_values_and_gradients(
    family: str, attention: str, of_rows: list[list[int]], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """calls: of attention in a layer; of sequences of one length it is one, of a batch."""
    model = _model(family, attention)
    whole = _run(model, None, of_rows)
    lengths = keep_apart(model)
    assert lengths is not None
    masks = _masks_of(monkeypatch)
    apart = _run(model, of_rows, of_rows)
    assert len(masks) == calls * model.config.num_hidden_layers
    assert len(lengths.apart) == (model.config.num_hidden_layers if len(of_rows[0]) > 1 else 0)
    assert not lengths.whole
    for one, other in zip(apart, whole, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-11 * float(other.abs().max()))


def _masks_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that transformers' attention functions are called with from now on."""
    masks, found = [], transformers_attention.attention_function

    def watched(name: str, module: Any) -> Any:
        def call(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any) -> Any:
            masks.append(mask)
            return found(name, module)(module, query, key, value, mask, *args, **kwargs)

        return call

    monkeypatch.setattr(transformers_attention, "attention_function", watched)
    return masks


def _batch(*of_rows: list[int], is_packed: bool = True) -> Batch:
    """Rows of sequences of these lengths, padded to 22; the tokens of each sequence are the same wherever it is."""
    rows = [[Sequence(np.arange(3, 3 + n, dtype=np.int32), np.ones(n, dtype=bool)) for n in row] for row in of_rows]
    batch = collate([joined(row) for row in rows], pad_token_id=0, row_multiple=22)
    return with_positions(batch, of_rows, [[*range(len(row))] for row in of_rows]) if is_packed else batch


# Of all causal ones a mixture alone is told where padding is.
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_row_of_one_sequence_has_no_mask_whatever_is_known_here(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither torch's kernel nor transformers' rule of packed rows, nor rows without padding."""
    monkeypatch.setattr(transformers_attention, "rule_of_one_sequence", lambda function: None)
    monkeypatch.setattr(varlen, "has_kernel", lambda query: False)
    model = meshlora.load(twin_config(family), dtype="float64")
    lengths, masks = keep_apart(model), _masks_of(monkeypatch)
    assert lengths is not None
    with lift():
        right = batch_log_probabilities(model, _batch([21], [13], is_packed=False))
        masks.clear()
        found = batch_log_probabilities(model, _batch([21], [13]))
    assert masks == [None] * model.config.num_hidden_layers
    assert not lengths.whole
    torch.testing.assert_close(found, right, rtol=0, atol=1e-12)

    with lift():
        mixed = batch_log_probabilities(model, _batch([21], [8, 5]))
    assert len(lengths.whole) == model.config.num_hidden_layers
    torch.testing.assert_close(mixed[1, :7], found[1, :7], rtol=0, atol=1e-12)


def test_padding_behind_a_sequence_is_kept_apart_where_tokens_may_see_it() -> None:
    model = meshlora.load(twin_config("llama"), dtype="float64")
    lengths = keep_apart(model)
    assert lengths is not None
    batch_log_probabilities(model, _batch([21], [13]))
    assert not lengths.apart
    model.meshlora.is_causal = False
    batch_log_probabilities(model, _batch([21], [13]))
    assert lengths.apart


def test_lengths_are_of_the_next_forward_alone() -> None:
    """A forward after it, of other rows, has the whole mask; so has one whose rows are of another length."""
    model = _model("llama", "sdpa")
    expected = _run(model, None)
    lengths = keep_apart(model)
    assert lengths is not None
    assert keep_apart(model) is lengths, "once"
    _run(model, _LENGTHS)
    lengths.apart.clear()
    for given in (None, [[13, 5], [3, 11]], [[13, 8]]):
        found = _run(model, given)
        assert all(map(torch.equal, found, expected))
    assert not lengths.apart


def test_rows_of_one_sequence_and_generation_are_as_before() -> None:
    model = _model("llama", "sdpa").eval()
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])

    def run() -> list[Tensor]:
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        return [model(ids, attention_mask=mask).logits, model(ids).logits, model.generate(ids[1:], **options)]

    before = run()
    lengths = keep_apart(model)
    assert all(map(torch.equal, run(), before))
    assert lengths is not None
    assert not lengths.apart


@for_each(
    "use",
    [
        lambda mask: mask[:, :, :2],
        lambda mask: ~mask,
        lambda mask: mask == 0,
        lambda mask: mask != 0,
        lambda mask: mask.shape,
        lambda mask: mask.logical_not(),
        lambda mask: torch.where(mask, 1.0, 0.0),
        lambda mask: torch.cat([mask, mask], 1),
        lambda mask: torch.ones(1, 1, 3, 3) * mask,
        lambda mask: mask & torch.ones(1, 1, 3, 3, dtype=torch.bool),
    ],
)
def test_code_that_looks_into_the_mask_sees_the_whole_one(use: Any) -> None:
    whole = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    found, expected = use(PackedMask(lambda **_: whole, {}, lambda *_: True)), use(whole)
    assert torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected
