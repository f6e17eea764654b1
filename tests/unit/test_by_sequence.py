"""Attention of packed rows runs one sequence at a time, for the values and gradients of the whole mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from meshlora.common.float64 import lift
from meshlora.common.row_masks import read_positions_in_masks
from meshlora.layers.by_sequence import PackedMask, keep_apart, rows_of
from meshlora.plan.families.twin import twin_config

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
@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "sdpa"), ("qwen3", "eager"), ("gemma3_text", "sdpa"), ("gpt_oss", "eager"), ("gemma2", "eager")],
)
@pytest.mark.parametrize("of_rows", [_LENGTHS, [[21], [21]]], ids=["several", "one a row"])
def test_one_at_a_time_they_have_the_values_and_gradients_of_the_whole_mask(
    family: str, attention: str, of_rows: list[list[int]]
) -> None:
    model = _model(family, attention)
    whole = _run(model, None, of_rows)
    lengths = keep_apart(model)
    assert lengths is not None
    apart = _run(model, of_rows, of_rows)
    assert len(lengths.apart) == model.config.num_hidden_layers
    assert not lengths.whole
    for one, other in zip(apart, whole, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-11 * float(other.abs().max()))


def test_lengths_are_of_the_next_forward_alone() -> None:
    """A forward after it, of other rows, has the whole mask; so has one whose rows are of another length."""
    model = _model("llama", "sdpa")
    expected = _run(model, None)
    lengths = keep_apart(model)
    assert lengths is not None
    assert keep_apart(model) is lengths, "once"
    _run(model, _LENGTHS)
    lengths.apart.clear()
    for given in (None, [[13, 5], [3, 11]], [[21]]):
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


@pytest.mark.parametrize(
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
