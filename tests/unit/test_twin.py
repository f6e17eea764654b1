"""Twins: tiny, all kinds of layers, all else as in the configuration they are made from."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from meshlora.wings.proved.families import PROVED
from meshlora_ground.errors import UserError
from meshlora_ground.model_class import model_class
from meshlora_judge.twin import language_model_types, layers_of_twin, shrink_config, twin_config
from tests.for_each import for_each

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
# Beyond the proved: fused blocks, mixtures of experts, latent attention, state spaces, shared layers, own layer sizes.
OTHERS = {"bloom", "deepseek_v3", "falcon_h1", "gemma3n_text", "gemma4_text", "gpt2", "jamba", "llama4_text", "mpt"} | {
    "nemotron_h",
    "qwen3_next",
    "zamba2",
}


LAYER_KINDS = ("layer_types", "mlp_layer_types", "no_rope_layers")


# What released models look like, where it differs from the defaults of their classes.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i for i in range(48)],
    "long_factor": [2.0 + i for i in range(48)],
    "original_max_position_embeddings": 4096,
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        {
            "mlp_bias": True,
            "attention_bias": True,
            "num_key_value_heads": 8,
            "rope_parameters": LLAMA3_ROPE,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "eos_token_id": [128001, 128008],
        },
    ),
    "mha": ("llama", {"num_attention_heads": 32, "num_key_value_heads": 32}),
    "gqa": ("llama", {"num_attention_heads": 32, "num_key_value_heads": 8}),
    "mqa": ("llama", {"num_attention_heads": 32, "num_key_value_heads": 1}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}),
    "qwen2-mrope": ("qwen2", {"rope_parameters": MROPE}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 30.0, "attention_dropout": 0.1}),
    "gemma3_text": ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "phi3": (
        "phi3",
        {
            "rope_parameters": LONG_ROPE,
            "max_position_embeddings": 131072,
            "num_attention_heads": 24,
            "pad_token_id": 199999,
            "sliding_window": 262144,
            "embd_pdrop": 0.1,
        },
    ),
    "phi": ("phi", {"qk_layernorm": True, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.4}}),
    "falcon": (
        "falcon",
        {"new_decoder_architecture": True, "hidden_size": 8192, "num_kv_heads": 8, "num_attention_heads": 128},
    ),
    "deepseek_v3": ("deepseek_v3", {"q_lora_rank": None}),
    "jamba": ("jamba", {"attn_layer_period": 6, "attn_layer_offset": 3}),
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": [1, 3], "decoder_sparse_step": 1}),
}


def _released(name: str) -> PretrainedConfig:
    model_type, values = RELEASED[name]
    return CONFIG_MAPPING[model_type](**copy.deepcopy(values))


def _configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A configuration and the ones inside it."""
    yield config
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            yield from _configs(part)


def _model(config: PretrainedConfig, device: str) -> Any:
    with torch.device(device):
        cls = model_class(config)
        return cls.from_config(config, attn_implementation="eager", experts_implementation="eager")


# Each feature needs a layer of its own, or a size cannot be smaller (a head of hunyuan_vl: four parts of M-RoPE).
LARGER = dict.fromkeys(("gemma4", "glm5_next", "hunyuan_vl", "inkling2", "deepseek_ocr2", "nemo_speechlm"), 5_000_000)
LARGER |= {"inkling_mm_model": 13_000_000, "unlimited_ocr": 6_000_000}


@pytest.mark.long
@for_each("family", sorted(PROVED | OTHERS))
def test_twin_is_tiny_and_draws_no_random_numbers(family: str) -> None:
    config = twin_config(family)
    assert sum(p.numel() for p in _model(config, "meta").parameters()) < LARGER.get(family, 1_000_000)
    for part in _configs(config):
        random = {k: v for k, v in vars(part).items() if "drop" in k and isinstance(v, int | float)}
        assert not any(random.values()), random


# A width that follows from another, heads by the width of a recurrence.
OWN_SIZES = {"gpt_neo", "recurrent_gemma"}


@pytest.mark.long
@for_each("family", sorted(PROVED - OWN_SIZES))
def test_twin_has_the_sizes_that_the_tests_rely_on(family: str) -> None:
    config = twin_config(family, tp=4)
    # A family whose layers are of several kinds has one of each, so two are the fewest.
    assert config.get_text_config().num_hidden_layers >= SIZES["num_hidden_layers"]
    sizes = {k: v for k, v in SIZES.items() if hasattr(config, k) and k != "num_hidden_layers"}
    if hasattr(config, "kv_lora_rank") or family == "whisper":  # no heads that are shared
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    if family == "deepseek_v4":  # one for all
        sizes["num_key_value_heads"] = 1
    if family == "xlnet":  # relative positions: any
        del sizes["max_position_embeddings"]
    assert {k: getattr(config, k) for k in sizes} == sizes


@pytest.mark.long
def test_twin_keeps_each_kind_of_layer_of_the_default() -> None:
    seen = Counter[str]()
    for family in language_model_types():
        if family == "gemma4_assistant":  # transformers refuses its own default
            continue
        default = vars(CONFIG_MAPPING[family]())
        kinds = {name: set(default[name]) for name in LAYER_KINDS if isinstance(default.get(name), list)}
        if not kinds:
            continue
        twin = twin_config(family)
        for name, of_default in kinds.items():
            seen[name] += len(of_default) > 1
            assert of_default <= set(getattr(twin, name)), (family, name)
            assert len(getattr(twin, name)) == twin.num_hidden_layers >= 2, (family, name)
    assert min(seen[name] for name in LAYER_KINDS) > 1  # the check looked at something


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "cohere2", "gpt_oss", "lfm3"])
def test_window_is_shorter_than_a_sequence(family: str) -> None:
    assert twin_config(family).sliding_window == 8


def test_counts_periods_and_shared_layers_keep_their_sense() -> None:
    dense_first = twin_config("deepseek_v3")
    assert (dense_first.first_k_dense_replace, dense_first.num_hidden_layers) == (1, 2)
    jamba = twin_config("jamba")
    assert jamba.layers_block_type == ["mamba"] * 4 + ["attention"]
    assert jamba.layers_num_experts == [1, 8, 1, 8, 1]
    shared = twin_config("gemma3n_text")
    own = shared.layer_types[: -shared.num_kv_shared_layers]
    assert set(own) == set(shared.layer_types[-shared.num_kv_shared_layers :])
    tied = twin_config("zamba2").layers_block_type
    assert tied.count("hybrid") == 2  # the second shares the weights of the first


def test_number_of_layers_can_be_chosen_and_all_kinds_take_turns() -> None:
    assert twin_config("llama", num_hidden_layers=4).num_hidden_layers == 4
    config = twin_config("gemma2", num_hidden_layers=5)
    assert len(config.layer_types) == config.num_hidden_layers == 5
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}


def test_flag_of_the_caller_brings_its_kind_of_layer() -> None:
    assert set(twin_config("qwen2").layer_types) == {"full_attention"}
    config = twin_config("qwen2", use_sliding_window=True)
    assert config.layer_types == ["full_attention", "sliding_attention"]
    assert config.sliding_window == 8


def test_overrides_win_under_both_names_of_a_field() -> None:
    assert twin_config("gpt2", hidden_size=32).n_embd == twin_config("gpt2", n_embd=32).n_embd == 32
    assert twin_config("llama", attention_dropout=0.1).attention_dropout == 0.1


@for_each("tp", [1, 2, 4, 8, 16, 6])
@for_each("family", ["llama", "gemma2", "gpt2", "bloom", "deepseek_v3", "qwen3_next", "mixtral"])
def test_heads_and_widths_divide_by_tp(family: str, tp: int) -> None:
    config = twin_config(family, tp=tp)
    sizes = ["num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "moe_intermediate_size"]
    sizes += ["linear_num_key_heads", "linear_num_value_heads", "kv_lora_rank"]
    for name in sizes:
        assert (getattr(config, name, None) or 0) % tp == 0, name
    _model(config, "meta")


def test_parts_of_a_configuration_shrink_too() -> None:
    config = twin_config("gemma3")
    assert (config.text_config.hidden_size, config.vision_config.hidden_size) == (64, 64)
    assert config.text_config.layer_types == ["sliding_attention", "full_attention"]


def test_layers_with_a_head_of_their_own_keep_it() -> None:
    config = twin_config("gemma4_text")
    widths = [layer.self_attn.q_proj.out_features for layer in _model(config, "meta").model.layers]
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2  # two kinds, then two that share keys
    assert widths == [8 * 8, 8 * 16] * 2


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "llama"])
def test_twin_does_not_look_ahead(family: str) -> None:
    model = _model(twin_config(family), "cpu").eval()
    tokens = torch.arange(3, 19).reshape(1, 16)
    changed = tokens.clone()
    changed[0, -1] = 99
    before, after = (model(input_ids=t, use_cache=False).logits[0, :-1] for t in (tokens, changed))
    assert torch.equal(before, after)


def test_unknown_family_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'llama'"):
        twin_config("lama")


@for_each("name", RELEASED)
def test_shrunk_configuration_computes_and_keeps_what_is_no_size(name: str) -> None:
    config = _released(name)
    before = copy.deepcopy(config.to_dict())
    tiny = shrink_config(config)
    assert config.to_dict() == before
    assert tiny.to_dict() == shrink_config(config).to_dict() == shrink_config(tiny).to_dict()
    assert type(tiny) is type(config)
    after = tiny.to_dict()
    assert after.keys() == before.keys()
    for key, value in before.items():  # flags, words and small floats (norm_eps, factors) are no sizes
        if isinstance(value, bool | str) or (isinstance(value, float) and "drop" not in key):
            assert after[key] == value, key
        assert (after[key] is None) == (value is None), key

    model = _model(tiny, "cpu")
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    tokens = torch.arange(3, 35).reshape(2, 16)
    logits = model(input_ids=tokens, use_cache=False).logits
    assert logits.shape == (2, 16, 256)
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize(("name", "num_kv_heads"), [("mha", 8), ("gqa", 4), ("mqa", 1)])
def test_shrinking_keeps_how_heads_are_shared(name: str, num_kv_heads: int) -> None:
    tiny = shrink_config(_released(name))
    assert (tiny.num_attention_heads, tiny.num_key_value_heads) == (8, num_kv_heads)
    assert shrink_config(_released("falcon")).num_kv_heads == 4


def test_shrinking_keeps_each_kind_of_layer_beside_its_neighbours() -> None:
    window = ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert shrink_config(_released("qwen2-window")).layer_types == window
    assert shrink_config(_released("jamba")).layers_block_type == ["mamba"] * 3 + ["attention", "mamba"]
    moe = shrink_config(_released("qwen2_moe"))
    assert (moe.num_hidden_layers, moe.mlp_only_layers) == (4, [1])


def test_layers_that_differ_by_their_adapter_stay_apart() -> None:
    config = _released("llama")
    assert layers_of_twin(config) == [0, 1]
    assert layers_of_twin(config, layers={5: "r=8"}) == [0, 1, 5, 6]
    assert shrink_config(config, layers={5: "r=8"}).num_hidden_layers == 4
    all_other = {layer: f"r={layer}" for layer in range(config.num_hidden_layers)}
    assert len(layers_of_twin(config, layers=all_other)) == 2  # not a layer for each


@for_each(
    ("tp", "real", "tiny"),
    [
        (4, (32, 8), (8, 4)),
        (2, (32, 32), (8, 8)),
        (4, (12, 2), (12, 2)),  # fewer key/value heads than ranks, heads no power of two
        (4, (28, 4), (12, 4)),
        (2, (14, 2), (10, 2)),
        (4, (16, 2), (8, 2)),
        (2, (12, 12), (10, 10)),
        (4, (12, 12), (12, 12)),
        (1, (9, 3), (9, 3)),
        (2, (71, 1), (9, 1)),
    ],
)
def test_ranks_share_the_heads_of_a_twin_as_those_of_the_model(
    tp: int, real: tuple[int, int], tiny: tuple[int, int]
) -> None:
    config = CONFIG_MAPPING["llama"](num_attention_heads=real[0], num_key_value_heads=real[1], hidden_size=64 * real[0])
    twin = shrink_config(config, tp=tp)
    assert (twin.num_attention_heads, twin.num_key_value_heads) == tiny
    assert twin.hidden_size % tp == twin.intermediate_size % tp == 0
    _model(twin, "meta")


@pytest.mark.parametrize(
    ("vocabulary", "tp", "tiny"), [(2049, 4, 257), (49155, 2, 257), (32000, 8, 256), (32001, 3, 258)]
)
def test_vocabulary_of_a_twin_leaves_the_rest_of_the_models(vocabulary: int, tp: int, tiny: int) -> None:
    twin = shrink_config(
        CONFIG_MAPPING["llama"](vocab_size=vocabulary, num_attention_heads=24, hidden_size=1536), tp=tp
    )
    assert twin.vocab_size == tiny


def test_rope_fits_the_tiny_head() -> None:
    assert shrink_config(_released("llama")).rope_parameters == LLAMA3_ROPE | {"original_max_position_embeddings": 32}
    assert sum(shrink_config(_released("qwen2-mrope")).rope_parameters["mrope_section"]) == 4
    phi3 = shrink_config(_released("phi3"))
    assert len(phi3.rope_parameters["long_factor"]) == len(phi3.rope_parameters["short_factor"]) == 3  # 0.75 * 8 / 2
    assert phi3.original_max_position_embeddings == phi3.rope_parameters["original_max_position_embeddings"] == 32
    assert shrink_config(_released("phi")).rope_parameters["partial_rotary_factor"] == 0.5  # 3.2 of 8 are no pairs
    nested = shrink_config(_released("gemma3_text")).rope_parameters
    assert nested["full_attention"]["factor"] == 8.0
    assert nested["full_attention"]["rope_theta"] != nested["sliding_attention"]["rope_theta"]


def test_special_tokens_are_inside_the_vocabulary() -> None:
    for config in (_released("llama"), _released("phi3"), CONFIG_MAPPING["gemma3"]()):
        for part in _configs(shrink_config(config)):
            tokens = {
                k: v for k, v in vars(part).items() if k.endswith(("_token_id", "_token_index")) and v is not None
            }
            assert all(0 <= v < 256 for v in tokens.values()), tokens
            assert len(set(tokens.values())) == len(tokens), tokens


@pytest.mark.parametrize(
    "family", ["cohere_compass", "fun_asr_nano", "granite4_vision", "hunyuan_vl", "inkling2", "molmo2", "muse_spark"]
)
def test_sizes_that_a_composite_names_in_two_places_agree(family: str) -> None:
    config = twin_config(family, tp=2)  # its class checks them
    assert config.get_text_config().hidden_size == 64


def test_sections_of_rope_may_be_four_and_a_head_has_one_size_under_two_names() -> None:
    text = twin_config("hunyuan_vl", tp=2).get_text_config()
    assert text.head_dim == 8
    assert text.rope_parameters["mrope_section"] == [1, 1, 1, 1]
