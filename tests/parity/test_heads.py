"""Fewer key/value heads than ranks, multi-query attention, fused layouts that a configuration chooses."""

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


@pytest.mark.parametrize(
    ("family", "overrides", "topologies"),
    [
        ("llama", {"num_key_value_heads": 2}, ("tp=4", "tp=4,sp")),
        ("llama", {"num_key_value_heads": 1}, ("tp=2,sp", "tp=4,sp")),
        ("olmo2", {"num_key_value_heads": 2}, ("tp=4,sp",)),  # with a norm over the replicated width
        ("cohere", {"num_key_value_heads": 2, "use_qk_norm": True}, ("tp=4",)),
        ("phi3", {"num_key_value_heads": 2}, ("tp=4,sp",)),
        ("gpt_bigcode", {"multi_query": True}, ("tp=2", "tp=4,sp")),
        ("gpt_bigcode", {"multi_query": False}, ("tp=4,sp",)),
        ("falcon", {**_FALCON_40B, "num_kv_heads": 4}, ("tp=2", "tp=4,sp")),
        ("falcon", {**_FALCON_40B, "num_kv_heads": 2}, ("tp=4,sp",)),
        ("falcon", _FALCON_RW, ("tp=2", "tp=4,sp")),
        ("falcon", _FALCON_7B, ("tp=4,sp",)),
        ("minicpm3", {}, ("tp=4,sp",)),
        ("bloom", {}, ("tp=4,sp",)),
        ("mpt", {}, ("tp=4,sp",)),
        ("llama", {"vocab_size": 249, "tie_word_embeddings": True}, ("tp=2", "tp=4,sp")),  # padded, and tied
    ],
)
def test_matches_one_process(family: str, overrides: dict[str, Any], topologies: tuple[str, ...], prove: Prove) -> None:
    outcomes = prove(family=family, overrides=overrides, topologies=topologies, steps=1)
    assert [str(outcome.topology) for outcome in outcomes] == list(topologies)
    for outcome in outcomes:
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)
