"""Padding at the end of rows: no mask where none is needed, and the numbers of one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from peft import LoraConfig
from torch import Tensor

import meshlora
from meshlora.adapter.attach import runtime
from meshlora.loading.blueprint import make_blueprint
from meshlora.model import padding
from meshlora.model.padding import is_causal
from meshlora.plan.base_options import BaseOptions
from meshlora.run.packing_check import _twin
from meshlora.train.batch import Batch
from meshlora.train.collation import collate
from meshlora.train.losses import batch_log_probabilities, shifted_loss
from meshlora.wings.found.probe import sees_later_tokens
from meshlora.wings.proved.families import PROVED, SEE_LATER_TOKENS
from meshlora_ground.compat import replaced
from meshlora_ground.dataset import Sequence
from meshlora_ground.float64 import lift
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config

# Longer and shorter than a twin's windows (8).
LENGTHS = (13, 21, 5)
# By its configuration: it sees its whole prompt, where that is marked.
SEES_ITS_PROMPT = {"paligemma"}
# Decoders with attention to an encoder, which runs in none of our models and is not causal: they keep the mask.
OF_ENCODERS_TOO = {
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "marian",
    "mbart",
    "pegasus",
    "plbart",
} | {"whisper"}


def _model(family: str, **config: Any) -> Any:
    return make_blueprint(twin_config(family, **config), Topology(), BaseOptions(dtype="float64")).model


def _batch(vocab_size: int) -> Batch:
    generator = np.random.default_rng(0)
    rows = [generator.integers(3, vocab_size, size=length).astype(np.int32) for length in LENGTHS]
    return collate([Sequence(ids, np.ones(len(ids), dtype=bool)) for ids in rows], pad_token_id=0)


def _needs(family: str) -> bool:
    blueprint = make_blueprint(twin_config(family), Topology(), BaseOptions(dtype="float64", disable_dropout=True))
    return not is_causal(blueprint.model, blueprint.plan)


def _check(family: str, attention: str | None) -> None:
    model = _twin(twin_config(family), attention, False)
    batch = _batch(model.config.get_text_config().vocab_size)
    with torch.no_grad(), lift():
        masked, plain = (
            model(input_ids=batch.input_ids, attention_mask=mask, use_cache=False).logits
            for mask in (batch.attention_mask, None)
        )
    real = batch.attention_mask.bool()
    scale = float(masked.abs().max())
    assert float((masked - plain)[real].abs().max()) <= 1e-12 * scale


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_a_mask_of_padding_changes_no_token(family: str) -> None:
    assert not _needs(family)
    _check(family, None)


@pytest.mark.proof
@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("family", sorted(PROVED))
def test_a_mask_of_padding_changes_no_token_of_any_family(family: str, attention: str | None) -> None:
    assert _needs(family) == (family in SEE_LATER_TOKENS | SEES_ITS_PROMPT | OF_ENCODERS_TOO)
    if family not in SEE_LATER_TOKENS | SEES_ITS_PROMPT:
        _check(family, attention)


@pytest.mark.parametrize("family", ["llama", "mamba", "xlnet"])
def test_what_is_recorded_of_later_tokens_is_what_a_twin_does(family: str) -> None:
    with lift():
        assert sees_later_tokens(twin_config(family)) == (family in SEE_LATER_TOKENS)


def test_a_family_that_sees_later_tokens_is_told_by_its_forward_alone() -> None:
    # Neither a module nor the configuration says so: without the record its padding would be seen.
    assert _needs("xlnet")
    config = twin_config("xlnet")
    with lift():
        config.attn_type = "bi"
        assert sees_later_tokens(config)
        config.attn_type = "uni"
        assert not sees_later_tokens(config)


@pytest.mark.proof
@pytest.mark.parametrize("family", sorted(PROVED))
def test_what_is_recorded_of_later_tokens_is_right_of_any_family(family: str) -> None:
    with lift():
        assert sees_later_tokens(twin_config(family)) == (family in SEE_LATER_TOKENS)


def _check_options(family: str) -> None:
    """With each option by which tokens see later ones, `is_causal` says so if a small model does."""
    for name, values in padding._SEE_ALL.items():
        for value in values:
            config = twin_config(family)
            text = config.get_text_config()
            if name != "is_causal" and not hasattr(text, name):  # masks of any family follow that one
                continue
            try:
                setattr(text, name, value)
            except StrictDataclassFieldValidationError:  # a value of other families
                continue
            try:
                with lift():
                    sees_later = sees_later_tokens(config)
            except (AttributeError, TypeError):  # its own code does not run so (modernbert-decoder, mpt)
                continue
            blueprint = make_blueprint(config, Topology(), BaseOptions(dtype="float64", disable_dropout=True))
            assert not (sees_later and is_causal(blueprint.model, blueprint.plan)), (name, value)


@pytest.mark.parametrize("family", ["rembert", "step3p7"])
def test_options_by_which_tokens_see_later_ones_are_known(family: str) -> None:
    _check_options(family)


@pytest.mark.proof
@pytest.mark.parametrize("family", sorted(PROVED))
def test_options_by_which_tokens_see_later_ones_are_known_of_any_family(family: str) -> None:
    _check_options(family)


def test_who_sees_later_tokens_needs_a_mask() -> None:
    assert _needs("paligemma")
    blueprint = make_blueprint(twin_config("llama"), Topology(), BaseOptions(dtype="float64"))
    blueprint.model.model.layers[1].self_attn.is_causal = False
    assert not is_causal(blueprint.model, blueprint.plan)
    unproved = dataclasses.replace(blueprint.plan, model_type="unheard")
    assert not is_causal(make_blueprint(twin_config("llama"), Topology(), BaseOptions()).model, unproved)


def _given(model: Any, run: Any) -> tuple[Any, list[Any]]:
    """(what `run()` returns, the masks that the forwards in it were called with)."""
    masks = []
    with replaced(type(model), "forward", _watched(type(model).forward, masks)):
        return run(), masks


def _watched(forward: Any, masks: list[Any]) -> Any:
    def watched(self: Any, **given: Any) -> Any:
        masks.append(given["attention_mask"])
        return forward(self, **given)

    return watched


def test_rows_of_a_run_have_no_mask_and_those_of_a_loop_have_theirs() -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = meshlora.load(twin_config("llama"), lora=lora, dtype="float64")
    batch = _batch(model.config.vocab_size)
    asked = []

    def read(ids: Tensor) -> None:
        asked.append(ids)

    from transformers import masking_utils

    with replaced(masking_utils, "find_packed_sequence_indices", read), lift():
        plain, masks = _given(model, lambda: batch_log_probabilities(model, batch))
    assert masks == [None]
    assert not asked, "transformers would read position ids on the device"

    runtime(model).is_causal = False
    with lift():
        masked, masks = _given(model, lambda: batch_log_probabilities(model, batch))
    assert masks[0] is batch.attention_mask
    torch.testing.assert_close(plain, masked, rtol=0, atol=1e-12)

    runtime(model).is_causal = True
    left = tuple(t.flip(1) for t in (batch.input_ids, batch.attention_mask, batch.labels.roll(-1, 1)))
    _, masks = _given(model, lambda: shifted_loss(model, *left, trained=torch.arange(1)))
    assert masks[0] is left[1], "where a loop pads is not known"


def test_nobody_looks_for_padding_in_rows_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would, to warn of it: the host waits for the device, and a record cannot be made of it."""
    config = twin_config("gpt2", pad_token_id=0)
    model = meshlora.load(config, lora=LoraConfig(r=4, target_modules=["c_attn"]), dtype="float64")
    monkeypatch.setattr(Tensor, "__contains__", lambda *_: pytest.fail("the device is read"))
    with lift():
        batch_log_probabilities(model, _batch(config.vocab_size))
