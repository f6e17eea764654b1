"""Which models keep packed sequences apart is shown on their twin; the others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModel

from meshlora.run.packing_check import check_packing
from meshlora.wings.packed_rows.row_masks import read_positions_in_masks
from meshlora_ground.compat import transformers_models
from meshlora_ground.errors import UnsupportedError
from meshlora_judge.twin import twin_config
from tests.for_each import for_each


def _check(model_type: str, **overrides: Any) -> bool:
    return check_packing(twin_config(model_type, **overrides), attn_implementation=None, trust_remote_code=False)


# Rotary and learned positions, sliding windows, experts, latent attention.
@for_each("family", ["qwen3", "gpt2", "gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss", "afmoe"])
def test_attention_that_reads_borders_from_positions_is_taken(family: str) -> None:
    """One sequence at a time, but where a mask depends on more than positions."""
    assert _check(family)


def test_attention_that_scales_by_its_place_in_the_row_is_refused() -> None:
    """Chunked attention, whose mask is of the whole row; llama4 numbers the tokens of a row for a scale, too."""
    assert not _check("llama4_text", attn_temperature_tuning=False)
    with pytest.raises(UnsupportedError, match="its layers mix sequences of one row"):
        _check("llama4_text")


# Attention of the model's own; an indexer that adds its choice of keys to the mask.
@pytest.mark.parametrize("family", ["gptj", "deepseek_v32"])
def test_attention_with_a_mask_of_the_whole_row_is_told(family: str) -> None:
    assert not _check(family)


# Convolutions, states, alibi, positions that are counted from the mask.
@pytest.mark.parametrize("family", ["lfm2", "bamba", "qwen3_next", "bloom", "mpt", "opt"])
def test_layers_that_run_across_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{family}': its layers mix sequences of one row"):
        _check(family)


def test_arguments_without_names_make_the_same_masks() -> None:
    """Of the model inside, which its head always calls by name."""
    model = AutoModel.from_config(twin_config("gpt_oss"), dtype=torch.float32).eval()
    ids, positions = torch.arange(8).unsqueeze(0), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    across = model(ids, None, positions).last_hidden_state
    read_positions_in_masks(model)
    by_name, by_place = model(input_ids=ids, position_ids=positions), model(ids, None, positions)
    assert torch.equal(by_name.last_hidden_state, by_place.last_hidden_state)
    assert not torch.allclose(across, by_place.last_hidden_state)


@pytest.mark.parametrize("name", [None, "eager", "sdpa"])
def test_every_attention_is_shown_by_itself(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = twin_config("llama")
    check_packing(config, attn_implementation=name, trust_remote_code=False)
    monkeypatch.setattr(transformers_models, "packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(UnsupportedError, match="mix sequences"):
        check_packing(config, attn_implementation=name, trust_remote_code=False)
