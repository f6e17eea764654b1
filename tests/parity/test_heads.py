"""Fewer key/value heads than ranks, multi-query attention, fused layouts that a configuration chooses; heads and
groups of mixers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

_FALCON_40B = {"new_decoder_architecture": True, "alibi": False, "parallel_attn": True, "bias": False}
_FALCON_RW = {
    "new_decoder_architecture": False,
    "multi_query": False,
    "alibi": True,
    "parallel_attn": False,
    "bias": True,
}
_FALCON_7B = {"new_decoder_architecture": False, "multi_query": True, "alibi": False}
_NORM_AFTER_GATE = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
_PADDED_AND_TIED = {"vocab_size": 249, "tie_word_embeddings": True}
# The same on other numbers of ranks, with sp or without it.
MORE: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("llama", {"num_key_value_heads": 2}, ("tp=4", "tp=4,sp")),
    ("llama", {"num_key_value_heads": 1}, ("tp=4,sp",)),
    ("cohere", {"num_key_value_heads": 2, "use_qk_norm": True}, ("tp=4",)),
    ("gpt_bigcode", {"multi_query": True}, ("tp=4,sp",)),
    ("gpt_bigcode", {"multi_query": False}, ("tp=4,sp",)),
    ("falcon", {**_FALCON_40B, "num_kv_heads": 4}, ("tp=4,sp",)),
    ("falcon", _FALCON_RW, ("tp=2", "tp=4,sp")),
    ("falcon", _FALCON_7B, ("tp=4,sp",)),
    ("minicpm3", {}, ("tp=4,sp",)),
    ("bloom", {}, ("tp=4,sp",)),
    ("mpt", {}, ("tp=4,sp",)),
    ("llama", _PADDED_AND_TIED, ("tp=2", "tp=4,sp")),
    ("qwen3_next", {"linear_key_head_dim": 16}, ("tp=4,sp",)),
    ("qwen3_next", {"linear_num_key_heads": 2}, ("tp=4,sp",)),
    ("qwen3_5_text", {"linear_key_head_dim": 16}, ("tp=4",)),
    ("olmo_hybrid", {"linear_num_key_heads": 2}, ("tp=4,sp",)),
    ("kimi_linear", {}, ("tp=4,sp",)),
    ("bailing_hybrid", {}, ("tp=4",)),
    ("mamba2", {"n_groups": 2}, ("tp=4,sp",)),
    ("bamba", {"mamba_n_groups": 2}, ("tp=2,sp", "tp=4")),
    ("bamba", {"mamba_conv_bias": False, "mamba_proj_bias": True}, ("tp=2,sp",)),
    ("granitemoehybrid", {}, ("tp=4,sp",)),
    ("nemotron_h", {"n_groups": 1}, ("tp=4",)),
    ("falcon_h1", {**_NORM_AFTER_GATE, "mamba_n_groups": 2}, ("tp=2,sp",)),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_n_groups": 2}, ("tp=4,sp",)),
    ("lfm2", {"conv_bias": True}, ("tp=4,sp",)),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "overrides", "topologies"),
    [
        pytest.param("llama", {"num_key_value_heads": 1}, ("tp=2,sp",), marks=pytest.mark.proof),
        ("olmo2", {"num_key_value_heads": 2}, ("tp=4,sp",)),  # with a norm over the replicated width
        ("cohere", {"num_key_value_heads": 1, "use_qk_norm": True}, ("tp=2",)),
        ("phi3", {"num_key_value_heads": 2}, ("tp=4,sp",)),
        ("gpt_bigcode", {"multi_query": True}, ("tp=2",)),
        ("falcon", {**_FALCON_40B, "num_kv_heads": 4}, ("tp=2",)),
        pytest.param("falcon", {**_FALCON_40B, "num_kv_heads": 2}, ("tp=4,sp",), marks=pytest.mark.proof),
        pytest.param("falcon", _FALCON_RW, ("tp=2,sp",), marks=pytest.mark.proof),
        pytest.param("falcon", _FALCON_7B, ("tp=2,sp",), marks=pytest.mark.proof),
        ("llama", _PADDED_AND_TIED, ("tp=2,sp",)),
        ("nemotron_h", {"n_groups": 2}, ("tp=4,sp",)),  # a gated norm over two of the ranks
        *(pytest.param(*case, marks=pytest.mark.proof) for case in MORE),
    ],
)
def test_matches_one_process(family: str, overrides: dict[str, Any], topologies: tuple[str, ...], prove: Prove) -> None:
    outcomes = prove(family=family, overrides=overrides, topologies=topologies, steps=1)
    assert [str(outcome.topology) for outcome in outcomes] == list(topologies)
    for outcome in outcomes:
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


# Some linears of each mixer, and of what stands beside it.
MIXERS = {
    "falcon_h1": ["in_proj", "q_proj", "down_proj"],
    "lfm2": ["in_proj", "out_proj", "w1", "w2"],
    "nemotron_h": ["in_proj", "q_proj", "o_proj", "up_proj"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"],
}
_PATTERNS = {"use_dora": True, "use_rslora": True, "rank_pattern": {"in_proj.*": 6}, "alpha_pattern": {"in_proj.*": 5}}
OPTIONS: dict[str, dict[str, Any]] = {
    "DoRA, rsLoRA and patterns": {"topologies": ("tp=2,sp", "dp=2,tp=2"), "lora": _PATTERNS},
    "nf4, recomputed": {"topologies": ("tp=2,sp", "dp=2,dp_shard,tp=2"), "quantization": "nf4", "recompute": True},
    "fp8": {"topologies": ("tp=2",), "quantization": "fp8"},
    "several adapters": {"topologies": ("dp=2,tp=2,sp",), "adapters": 2},
    "resumed": {"topologies": ("dp=2,dp_shard,tp=2,sp",), "resume": True},
}


@pytest.mark.proof
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("family", MIXERS)
def test_mixers_with_options_match_one_process(family: str, option: str, prove: Prove) -> None:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": MIXERS[family], **OPTIONS[option].get("lora", {})}
    for outcome in prove(family=family, steps=2, **OPTIONS[option] | {"lora": lora}):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)
