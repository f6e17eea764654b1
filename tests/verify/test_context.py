"""Context parallelism trains what one process trains: attention, windows, sinks, recurrent mixers, experts."""

from __future__ import annotations

import pytest

from meshlora.verify.options import Request
from meshlora.verify.request import prepare_proof
from meshlora.wings.context import mixing
from meshlora_ground.compat import transformers_models
from meshlora_ground.errors import UnsupportedError
from meshlora_judge import case
from tests.conftest import Prove

# Sizes of cp and tp differ where both are, so that neither is taken for the other.
PROVED_HERE = {
    "packed": ("llama", "cp=3", True),
    "windows": ("gemma3_text", "dp=2,cp=2", True),
    "window alone": ("mistral", "cp=3", False),
    "sinks and experts": ("gpt_oss", "cp=2,ep=2", False),
    "delta nets": ("qwen3_next", "cp=3", False),
    "state spaces": ("bamba", "tp=2,sp,cp=2", False),
    "convolutions": ("lfm2", "cp=3", False),
    "per channel": ("kimi_linear", "cp=2,ep=2", False),
    "two calls": ("diffllama", "cp=2", False),
    "scaled queries": ("beam", "cp=3", True),
    "an output in the shape of the input": ("gpt2", "cp=3", True),
    "a mask of its own for the mixer": ("falcon_h1", "cp=2", False),
}
# The kill table has packed rows and delta nets on cp=2 by default.
IN_MAKE_TEST = {"sinks and experts", "an output in the shape of the input"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in IN_MAKE_TEST else pytest.mark.proof) for n in PROVED_HERE]
)
def test_cut_sequences_are_trained_as_whole_ones(name: str, prove: Prove) -> None:
    family, topology, packing = PROVED_HERE[name]
    (outcome,) = prove(family=family, packing=packing, topologies=(topology,), steps=1)
    assert outcome.passed, (outcome.divergence, outcome.error)


# A rank has a single token of a row, or none, or fewer than a convolution reaches.
SHORT_ROWS = {
    "state spaces": ("bamba", "cp=2"),
    "state spaces beside attention": ("falcon_h1", "tp=2,sp,cp=2"),
    "a rank without rows": ("nemotron_h", "dp=2,cp=2"),
    "delta nets": ("qwen3_next", "cp=3"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "state spaces" else pytest.mark.proof) for n in SHORT_ROWS]
)
def test_rows_shorter_than_a_kernel_or_than_the_ranks_are_trained(
    name: str, prove: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case, "_LENGTHS", (5, 5, 2, 2, 1))
    family, topology = SHORT_ROWS[name]
    (outcome,) = prove(family=family, topologies=(topology,), steps=1)
    assert outcome.passed, (outcome.divergence, outcome.error)


# Attention in parts: keys that pass by, which the kill table has too, and sdpa's on a CPU.
IN_PARTS = {
    "ring": ("llama", "cp=3,ring", "eager", True),
    "gathered": ("llama", "cp=3", "sdpa", True),
    "gathered, padded": ("qwen3", "dp=2,cp=2", "sdpa", False),
    "ring, padded": ("qwen3", "tp=2,sp,cp=2,ring", "sdpa", False),
    "windows": ("gemma3_text", "cp=3,ring", "eager", True),
    "windows, sdpa": ("gemma3_text", "cp=3", "sdpa", True),
    "sinks": ("gpt_oss", "cp=3,ring", "eager", False),
    "soft caps": ("gemma2", "cp=2,ring", "eager", True),
    "experts": ("qwen3_moe", "cp=2,ep=2,ring", "eager", False),
    "a key for all heads": ("gpt_bigcode", "cp=2,ring", "eager", True),
    "learned positions": ("gpt2", "cp=3,ring", "eager", False),
    "keys wider than values": ("deepseek_v3", "cp=2,ring", "eager", True),
    "states beside": ("qwen3_next", "cp=2,ring", "eager", False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "gathered" else pytest.mark.proof) for n in IN_PARTS]
)
def test_attention_in_parts_trains_what_whole_attention_trains(name: str, prove: Prove) -> None:
    family, topology, implementation, packing = IN_PARTS[name]
    options = {"packing": packing, "attn_implementation": implementation, "steps": 1}
    (outcome,) = prove(family=family, topologies=(topology,), **options)
    assert outcome.passed, (outcome.divergence, outcome.error)


@pytest.mark.proof
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_layers_computed_twice_pass_on_keys_and_states_again(family: str, prove: Prove) -> None:
    (outcome,) = prove(family=family, topologies=("cp=2",), steps=1, recompute=True)
    assert outcome.passed, (outcome.divergence, outcome.error)


# What sees other tokens by no function of a registry: with keys, latents and an indexer's keys from a cache, with a
# mask of its own, with numbers of its tokens, on whole rows.
BY_A_CACHE = {
    "indexers": ("deepseek_v32", "cp=2", True),
    "indexers, tp": ("deepseek_v32", "cp=2,tp=2,sp", False),
    "indexers, ep": ("glm_moe_dsa", "cp=2,ep=2", True),
    "a bias of positions": ("bloom", "cp=3", False),
    "a mask of its own": ("gpt_neo", "cp=3", False),
    "numbers of tokens": ("llama4_text", "cp=3", False),
    "mamba-1": ("jamba", "cp=2", False),
    "mamba-1, sp": ("mamba", "cp=2,tp=2,sp", False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "indexers" else pytest.mark.proof) for n in BY_A_CACHE]
)
def test_keys_from_a_cache_train_what_those_of_whole_sequences_train(name: str, prove: Prove) -> None:
    family, topology, packing = BY_A_CACHE[name]
    (outcome,) = prove(family=family, topologies=(topology,), packing=packing, steps=1)
    assert outcome.passed, (outcome.divergence, outcome.error)


def test_other_ways_to_see_tokens_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "_BY_THEMSELVES", set())
    with pytest.raises(UnsupportedError, match="its Block sees other tokens neither by"):
        prepare_proof(Request(family="openai-gpt", topologies=("cp=2",)))


@pytest.mark.parametrize(
    ("family", "topology", "words"),
    [("openai-gpt", "cp=2,tp=2,sp", "leave out sp"), ("deepseek_v32", "cp=2,ring", "leave out ring")],
)
def test_topologies_without_a_way_to_see_tokens_are_refused(family: str, topology: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        prepare_proof(Request(family=family, topologies=(topology,)))


def test_a_family_that_numbers_tokens_from_0_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_models, "asks_for_earlier", lambda module: False)
    with pytest.raises(UnsupportedError, match="its Llama4TextAttention itself numbers the tokens"):
        prepare_proof(Request(family="llama4_text", topologies=("cp=2",)))


def test_attention_of_gpt2_in_code_of_its_own_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="reorder_and_upcast_attn on cp=2: it is attention in code of"):
        prepare_proof(Request(family="gpt2", topologies=("cp=2",), overrides={"reorder_and_upcast_attn": True}))
