"""Twins: tiny configurations of the same `model_type`, derived from a configuration alone.

Owns: which fields of a configuration are sizes, and their tiny values, chosen so that tensor-parallel ranks share heads
and features as in the original; which layers are kept; exceptions of single families. Fields other than sizes
(activations, biases, norms, kinds of rope, how heads are shared) are kept. Randomness in training (dropout, jitter) is
off, as twins are for comparison. Does not own: weights.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from meshlora_ground.errors import UnsupportedError, UserError, did_you_mean, reason

# Kind of size -> the configuration fields that hold it. Families spell the same size differently.
_FIELDS = {
    "hidden": "hidden_size d_model embedding_dim emb_dim embed_dim word_embed_proj_dim embedding_size lru_width "
    "input_embedding_size output_embedding_size backbone_hidden_size shape_embed_dim pronunciation_embed_dim "
    "out_hidden_size hidden_size_global vision_output_dim projector_input_dim projector_output_dim output_proj_dims "
    "ple_embed_dim ext_pw_out_channel depthwise_separable_out_channel nemo_conv_channels output_channels "
    "adapter_in_dim adapter_out_dim adapter_input_size pooler_hidden_size text_hidden_size audio_hidden_size "
    "moe_hidden_size upsample_groups",
    "inner": "intermediate_size intermediate_size_mlp dense_intermediate_size ffn_dim ffn_hidden_size dff dim_ff "
    "alignment_intermediate_size projector_hidden_size "
    "n_inner mlp_dim encoder_ffn_dim decoder_ffn_dim feed_forward_size d_inner",
    "expert_inner": "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
    "shared_experts_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size",
    "heads": "num_attention_heads attention_heads encoder_attention_heads decoder_attention_heads num_heads n_heads "
    "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads num_attention_heads_per_layer "
    "resampler_n_heads "
    "linear_num_value_heads linear_num_heads index_n_heads indexer_n_heads num_query_groups conf_num_attention_heads",
    "head_dim": "head_dim resampler_head_dim "
    "attention_head_size d_head dim_head kv_channels d_kv swa_head_dim qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim query_pre_attn_scalar "
    "mamba_d_head mamba_headdim mamba_head_dim",
    "two_head_dims": "qk_head_dim index_head_dim indexer_head_dim attention_head_dim",
    "rank": "q_lora_rank kv_lora_rank o_lora_rank adapter_rank laurel_rank gated_norm_rank hc_lowrank mamba_dt_rank "
    "time_step_rank d_rel router_hidden_size hidden_size_per_layer_input state_size mamba_d_state ssm_state_size",
    "head_rank": "linear_head_dim",  # of a head, and of the gates of low rank beside it
    "layers": "num_hidden_layers num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers "
    "num_layers_per_stack num_blocks depth conf_num_hidden_layers",
    "vocabulary": "vocab_size vocab_size_per_layer_input decoder_vocab_size shape_vocab_size "
    "pronunciation_vocab_size encoder_hash_byte_group_vocab ngram_vocab_size_base",
    "positions": "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions "
    "context_length model_max_length",
    "window": "sliding_window sliding_window_size window_size attention_window_size attention_chunk_size "
    "local_attention local_attention_window_len chunk_size mamba_chunk_size block_size index_topk "
    "indexer_budget index_block_size rel_extent patch_size",
    "image": "image_size",
    # These may already be smaller, and 1 has a meaning: one expert per token, one group.
    "at most 8": "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num compress_rates",
    "at most 4": "floor_scale rotary_dim o_groups mm_tokens_per_image index_kpool",
    "at most 2": "num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k top_k_experts n_group "
    "num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts",
    "at most 1": "topk_group index_topk_blocks",
}
_KIND_OF = {name: kind for kind, names in _FIELDS.items() for name in names.split()}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_RANDOM = re.compile(r"drop|jitter")

# Vocabulary of a twin, to which the original's remainder modulo tp is added.
_VOCABULARY = 256
# The most layers with which a twin is still fast.
_MOST_LAYERS = 12

# Shared heads -> the heads that share them. Whether there are as many, one, or a number in between is preserved.
_SHARED_HEADS = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "kv_n_heads": "n_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "linear_num_key_heads": "linear_num_value_heads",
}

# How fields specify the kind of a layer: an entry per layer; a list of layers; the number of first or last layers of
# the kind; or a period and, as the value here, the position in it.
_PER_LAYER = re.compile(r"^(?!mtp_|kv_source_).*(layer|type|pattern|intermediate_size)")
_INDEX_LISTS = {"mlp_only_layers", "moe_layers", "full_attn_idxs", "hybrid_layer_ids", "attn_layer_indices"}
_INDEX_LISTS |= {"local_layer_ids", "cross_attention_layers"}
# Fields of vision towers, of which a twin has two layers and 4 x 4 patches.
_OF_TOWERS = {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [1]}
_FIRST_LAYERS = {"first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers"}
_LAST_LAYERS = {"num_kv_shared_layers"}
_PERIODS: dict[str, str | int] = {
    "decoder_sparse_step": -1,
    "moe_layer_interval": -1,
    "attn_layer_period": "attn_layer_offset",
    "expert_layer_period": "expert_layer_offset",
    "n_layers_per_attn_res_block": 0,
}

# Replacements of a family's defaults before shrinking: kinds of layers that only its released models have, and fields
# without which its default configuration cannot be built.
_THREE_LAYERS = {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_QWEN4 = dict(zip(("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim"), (4, 1, 256), strict=True))
_QWEN4 |= {"indexer_budget": 2048, "indexer_compress_ratio": 4}
# Of the small ones, of the large ones, of the one with experts.
_GEMMA4: dict[str, Any] = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
_GEMMA4 |= {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
_GEMMA4 |= {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
_GEMMA4 |= {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
_COMPASS = _THREE_LAYERS | {
    "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE | {"rope_theta": 1e3}}
}
# Blocks begin at layers of both kinds.
_INKLING2: dict[str, Any] = {"num_hidden_layers": 4}
_INKLING2 |= {"layer_types": ["hybrid_sliding", "hybrid", "hybrid", "hybrid_sliding"]}
_INKLING2 |= {"n_layers_per_attn_res_block": 2, "log_scaling_n_floor": 4}
_BY_FAMILY: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    # What it makes images with has sizes of its own; ids of the tokens of images, and of their place.
    "chameleon": {"vocabulary_map": {"<image>": 250, "IMGIMGAZ": 251}, "vq_config": {"base_channels": 32}},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "dbrx": {  # as published: of the default's one expert for each token the normalised weight is 1
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4},
    },
    "cohere2_moe": {"num_shared_experts": 2},
    "deepseek_ocr2": {
        "text_config": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 6}
        | {"n_group": 1, "topk_group": 1}
    },
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 6},
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6},
    "flex_olmo": {"num_experts": 8},
    "gemma4": {"text_config": _GEMMA4 | {"use_bidirectional_attention": "vision"}, "vision_config": {}},
    "gemma4_text": _GEMMA4,
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2"},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "inkling_text": {"num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]}
    | {"mlp_layer_types": ["dense", "sparse", "sparse"], "log_scaling_n_floor": 4, "unpadded_vocab_size": 200058},
    "inkling2": {"text_config": _INKLING2},
    "inkling2_text": _INKLING2,
    "janus": {  # what it makes images with has sizes of its own
        "vision_config": {"projection_dim": 64},
        "vq_config": {"base_channels": 32, "latent_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 64}
        | {"projection_dim": 64, "image_token_embed_dim": 64, "num_res_blocks": 1},
    },
    "laguna": _THREE_LAYERS,
    "llama4_text": {"num_experts_per_tok": 2},
    "lfm2": {"full_attn_idxs": [1]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "mellum": _THREE_LAYERS,
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "muse_spark": {"text_config": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}},
    "minimax_m3_vl_text": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
    | {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    **{key: {"mlp_only_layers": [0]} for key in ("qwen2_moe", "qwen3_moe", "qwen3_next")},
    "qwen3_asr": {"audio_config": {"downsample_hidden_size": 16}},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "step3p7": {"text_config": {"sliding_window": 512}},  # without one its model does not run
    "reformer": {"axial_pos_embds": False},
    "gemma3": {"vision_config": {"vision_use_head": False}},  # as published
    "xmod": {"default_language": "en_XX"},
}

# Sections of M-RoPE, of time, height and width (hunyuan_vl: and of images), where a default configuration leaves
# them to the model's code.
_M_ROPE = {
    **{key: [16, 24, 24] for key in ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "paddleocr_vl")},
    **{key: [24, 20, 20] for key in ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "cosmos3_edge")},
    **{key: [8, 12, 12] for key in ("glm4v", "glm4v_moe", "glm46v", "glmga", "glm_ocr")},
    "ernie4_5_vl_moe": [22, 22, 20],
    "hunyuan_vl": [16, 16, 16, 16],
}


def language_model_types() -> list[str]:
    """The sorted `model_type`s with a language model in the installed transformers, composites included."""
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return sorted(names.union(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES))


def twin_config(model_type: str, *, tp: int = 1, block: int = 1, **overrides: Any) -> PretrainedConfig:
    """The twin of a family: its default configuration shrunk, with grouped key/value heads, then `overrides`.

    block: what divides each rank's widths, heads put together included.
    `num_hidden_layers` chooses among the layers of the default; other overrides are taken as they are.

    Raises:
        UserError: transformers has no such model type. UnsupportedError: its sizes cannot be shrunk.
    """
    if model_type not in CONFIG_MAPPING:
        rule = "transformers has no such family"
        raise UserError(f"model_type {model_type!r}", rule, did_you_mean(model_type, CONFIG_MAPPING))
    cls = CONFIG_MAPPING[model_type]
    # Flags decide of what kinds the layers are, so they come before the choice of layers; sizes come after it.
    flags = {k: v for k, v in overrides.items() if v is None or isinstance(v, bool | str)}
    config = cls(**{**_BY_FAMILY.get(model_type, {}), **flags})
    if model_type in _M_ROPE:
        config.get_text_config().rope_parameters["mrope_section"] = _M_ROPE[model_type]
    sizes = _sizes_of(tp, block)
    data = _shrunk(config, sizes, num_layers=overrides.get("num_hidden_layers"), differ=None)
    chosen: dict[str, Any] = {**_TOKENS, "is_decoder": True}
    if not data.get("qk_rope_head_dim"):  # multi-head latent attention has no key/value heads to share
        chosen |= {"num_key_value_heads": sizes["kv_heads"], "head_dim": sizes["head_dim"]}
    data.update({k: v for k, v in chosen.items() if k in data})
    if data.get("is_encoder_decoder") and data.get("decoder_start_token_id") is None:
        data["decoder_start_token_id"] = data.get("pad_token_id")  # as t5's checkpoints have it
    data.update({cls.attribute_map.get(k, k): v for k, v in overrides.items() if k != "num_hidden_layers"})
    return _made(cls, data)


def shrink_config(
    config: PretrainedConfig,
    *,
    tp: int = 1,
    block: int = 1,
    layers: Mapping[int, Hashable] | None = None,
    least: int = 2,
    keeps_tokens: bool = False,
) -> PretrainedConfig:
    """A tiny copy of `config` with heads and vocabulary shared by `tp` ranks as in `config`, widths divisible by `tp`,
    and local widths divisible by `block`. The argument is not changed.

    layers: layer number -> any further property that distinguishes it. least: number of its layers.
    keeps_tokens: vocabulary, ids of tokens and positions are those of `config`: it takes texts of any real length.
    """
    number = _more_layers(config, layers, least)
    sizes = _sizes_like(config, tp, block)
    if keeps_tokens:
        sizes = {kind: size for kind, size in sizes.items() if kind not in ("vocabulary", "positions")}
    return _made(type(config), _shrunk(config, sizes, num_layers=number, differ=layers or {}))


def _more_layers(config: PretrainedConfig, layers: Mapping[int, Hashable] | None, least: int) -> int | None:
    """`least` if a twin has fewer layers by itself, else None."""
    kept = _kept_layers(_common_fields(config.get_text_config()), None, layers or {})
    return least if len(kept) < least else None


def _made(cls: type[PretrainedConfig], data: dict[str, Any]) -> PretrainedConfig:
    try:
        return cls(**data)
    except Exception as error:  # some check that sizes fit together, with errors of all kinds
        raise UnsupportedError(f"model_type {cls.model_type!r}", f"it has no twin ({reason(error)})") from error


def layers_of_twin(
    config: PretrainedConfig, *, layers: Mapping[int, Hashable] | None = None, least: int = 2
) -> list[int]:
    """The layers of `config` that the layers of its twin represent."""
    number = _more_layers(config, layers, least)
    return _kept_layers(_common_fields(config.get_text_config()), number, layers or {})


def _sizes_like(config: PretrainedConfig, tp: int, block: int) -> dict[str, int]:
    """Kind of size -> tiny value that tp ranks share as they share the original.

    Preserved: which head counts tp divides, the number of key/value heads if below tp, groups of one head, counts that
    are odd or not a power of two, and the vocabulary modulo tp.
    """
    whole = _common_fields(config.get_text_config())
    for shared, by in (*_SHARED_HEADS.items(), ("num_attention_heads",) * 2):  # no shared heads: one each
        heads, kv_heads = whole.get(by), whole.get(shared)
        if isinstance(heads, int) and isinstance(kv_heads, int):
            break
    else:
        return _sizes_of(tp, block)
    if kv_heads == heads:
        few = many = _least_like(heads, tp, least=min(heads, 8), multiple=1)
    else:
        few = kv_heads if kv_heads < tp else _least_like(kv_heads, tp, least=min(kv_heads, 4), multiple=1)
        many = _least_like(heads, tp, least=max(2 * few, min(heads, 8)), multiple=few if heads % kv_heads == 0 else 1)
    vocabulary = _VOCABULARY + ((whole.get("vocab_size") or 0) - _VOCABULARY) % tp
    return _sizes(many, few, vocabulary, tp, block)


def _shrunk(
    config: PretrainedConfig, sizes: dict[str, int], *, num_layers: int | None, differ: Mapping[int, Hashable] | None
) -> dict[str, Any]:
    """The fields of the tiny copy, by their names in its class. `num_layers`, `differ`: as in `_kept_layers`."""
    data: dict[str, Any] = config.to_dict()
    data.pop("quantization_config", None)  # the twin's weights are random, not quantized
    whole = _common_fields(config)  # as it was
    layers = _kept_layers(whole, num_layers, differ)
    next_token = sizes.get("vocabulary")  # None: those of real tokens are kept
    for field, value in data.items():
        name = _common_name(field, config)
        part = config.__dict__.get(field)
        if isinstance(part, PretrainedConfig):
            given = num_layers if field == "text_config" else None
            data[field] = _shrunk(part, sizes, num_layers=given, differ=differ)
        elif value is None or isinstance(value, bool):
            continue
        elif name in _OF_TOWERS:
            data[field] = [*_OF_TOWERS[name]]
        elif _RANDOM.search(name) and isinstance(value, int | float):
            data[field] = type(value)(0)
        elif name in _TOKENS:
            data[field] = _TOKENS[name] if next_token is not None else value
        elif name.endswith(("_token_id", "_token_index")):
            if next_token is None:
                continue
            next_token -= 1
            data[field] = next_token
        elif name == "num_hidden_layers":
            # A stack that runs several times counts each time.
            data[field] = value // whole["num_layers_per_stack"] * 2 if "num_layers_per_stack" in whole else len(layers)
        elif name == "rope_parameters":
            data[field] = _rope(value, whole, sizes)
        elif name == "original_max_position_embeddings":
            data[field] = _original_positions(value, whole, sizes)
        elif name == "per_layer_config":
            data[field], own = {}, {int(k): v for k, v in value.items()}
            for new, old in enumerate(layers):
                if old in own:
                    data[field][str(new)] = _tiny_layer(own[old], whole, sizes)
        else:
            data[field] = _tiny(name, _of_layers(name, value, whole, layers), whole, sizes)
    if "fullatt_block_indexes" in data:  # windows of two by two merged patches
        data["window_size"] = 2 * data["spatial_merge_size"] * data["patch_size"]
    if "adaptor_config" in data and "intermediate_size" in data["adaptor_config"]:  # fun_asr_nano
        data["adaptor_config"]["intermediate_size"] = sizes["hidden"] // 4
    if {"n_layers", "temporal_patch_size"} <= data.keys():  # inkling: with fewer it needs scipy to place them
        data["n_layers"] = 8
    if {"patch_sizes", "depths"} <= data.keys():  # muse_spark's sounds: an entry for each of two layers
        data |= {"patch_sizes": [16, 6], "hidden_sizes": [sizes["hidden"]] * 2, "depths": [1, 1]}
    if "out_hidden_size" in data and "projector_hidden_size" in data:  # muse_glimmer: of patches put together
        data["out_hidden_size"] = data["vision_config"]["hidden_size"] * data["vision_config"]["merge_size"] ** 2
    if "projector_input_dim" in data:  # llama4: of patches put together
        data["intermediate_size"] = round(data["hidden_size"] / data["pixel_shuffle_ratio"] ** 2)
    return data


def _common_fields(config: PretrainedConfig) -> dict[str, Any]:
    return {_common_name(field, config): value for field, value in config.to_dict().items()}


def _common_name(field: str, config: PretrainedConfig) -> str:
    """`n_embd` -> `hidden_size`. Some maps are reversed (`vocab_size` -> `n_words`): names in `_KIND_OF` win."""
    name = {real: name for name, real in config.attribute_map.items()}.get(field, field)
    is_plain = field in _KIND_OF and (name not in _KIND_OF or field == "head_dim")  # hunyuan_vl's other name for it
    return field if is_plain else name


def _tiny(name: str, value: Any, whole: dict[str, Any], sizes: dict[str, int]) -> Any:
    """The tiny value of one field; `whole` has the original fields. 0, None, flags and strings (`auto`) are kept."""
    if isinstance(value, list) and name in _KIND_OF:
        return [_tiny(name, v, whole, sizes) for v in value]
    if isinstance(value, dict) and name in _KIND_OF:
        return {k: _tiny(name, v, whole, sizes) for k, v in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return value
    if name in _SHARED_HEADS:
        return _tiny_heads(int(value), whole.get(_SHARED_HEADS[name]), sizes)
    # State-space mixers: heads * head_dim = expand * hidden.
    expand = whole.get("mamba_expand", whole.get("expand", 2))
    if name in ("n_groups", "mamba_n_groups", "mamba_ngroups"):
        return _tiny_groups(int(value), int(expand * sizes["heads"]), sizes["tp"])
    is_mamba2 = (name, True) in (("num_heads", "state_size" in whole), ("n_mamba_heads", "mamba_headdim" in whole))
    if is_mamba2 or name in ("mamba_n_heads", "mamba_num_heads"):
        return int(expand * sizes["heads"])
    if name == "mamba_d_ssm":
        return int(expand * sizes["hidden"])
    if name == "unpadded_vocab_size" and "vocabulary" in sizes:  # rows of the head are padding (inkling)
        return sizes["vocabulary"] - 6
    if name == "attention_hidden_size":
        return value // whole["hidden_size"] * sizes["hidden"]
    kind = _KIND_OF.get(name, "")
    if name == "head_dim" and value > (whole.get("qk_rope_head_dim") or value):  # the sum of both parts of the head
        kind = "two_head_dims"
    if kind.startswith("at most"):
        return min(value, int(kind.rsplit(" ", 1)[-1]))
    return sizes.get(kind, value)


def _tiny_layer(own: dict[str, Any], whole: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """The tiny per-layer fields. A larger head (gemma4) stays larger, or the layer would be like the others."""
    tiny = {k: _tiny(k, v, whole | own, sizes) for k, v in own.items()}
    if own.get("head_dim", 0) > (whole.get("head_dim") or math.inf):
        tiny["head_dim"] *= 2
    return tiny


def _kept_layers(whole: dict[str, Any], num_layers: int | None, differ: Mapping[int, Hashable] | None) -> list[int]:
    """The first layer of each kind, at least two; or `num_layers`, cycling through the kinds.

    differ: further properties that distinguish layers. If given, each kind is kept next to each of its neighbours; else
    one layer of each. Both hold only as long as they keep at most `_MOST_LAYERS`.
    """
    total = whole.get("num_hidden_layers") or 0
    kinds: list[Any] = [_kind(layer, whole, total) for layer in range(total)]
    layers = _first_of_each(kinds)
    if differ is not None:
        marked = [(kind, differ.get(layer)) for layer, kind in enumerate(kinds)]
        ways = (_beside_neighbours(marked), _first_of_each(marked), _beside_neighbours(kinds))
        layers = next((kept for kept in ways if len(kept) <= _MOST_LAYERS), layers)
    if any(_is_period(field, value, whole) for field, value in whole.items()):
        layers = list(range(max(layers) + 1))  # a period counts layers, so it only makes sense without gaps
    if "per_layer_config" in whole and kinds[layers[-1]] != kinds[-1]:
        layers.append(total - 1)  # transformers makes the last one of its kind, but for what the layer has of its own
    return sorted(layers[i % len(layers)] for i in range(num_layers or max(2, len(layers)))) if layers else []


def _first_of_each(kinds: list[Any]) -> list[int]:
    """The first layer of each kind."""
    return [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]


def _beside_neighbours(kinds: list[Any]) -> list[int]:
    """Layers among which every pair of consecutive kinds occurs."""
    layers = [0][: len(kinds)]
    for layer in range(1, len(kinds)):
        pairs = list(itertools.pairwise(kinds[kept] for kept in layers))
        if (kinds[layer - 1], kinds[layer]) not in pairs:
            layers += [layer] if kinds[layers[-1]] == kinds[layer - 1] else [layer - 1, layer]
    return layers


def _kind(layer: int, whole: dict[str, Any], total: int) -> list[Any]:
    """Everything the configuration specifies about one layer."""
    kind: list[Any] = []
    for name, value in whole.items():
        if value is None:
            continue
        if name in _INDEX_LISTS:
            kind.append(layer in value)
        elif _is_per_layer(name, value, total):
            kind.append(value[layer])
            if value[layer] == "hybrid" and whole["model_type"].startswith("zamba"):
                # Later ones share the weights of the first ones.
                kind.append(min(value[:layer].count("hybrid"), whole.get("num_mem_blocks", 1)))
        elif name == "block_types":
            kind.append(value[layer % len(value)])
        elif name in _FIRST_LAYERS:
            kind.append(layer < value)
        elif name in _LAST_LAYERS:
            kind.append(layer >= total - value)
        elif _is_period(name, value, whole):
            offset = _PERIODS[name]
            kind.append(layer % value == (whole[offset] if isinstance(offset, str) else offset % value))
        elif name == "kv_source_layers":
            kind.append(value[layer] == layer)
        elif name == "per_layer_config":
            kind.append({int(k): v for k, v in value.items()}.get(layer))
    return kind


def _is_per_layer(name: str, value: Any, total: int) -> bool:
    return isinstance(value, list) and len(value) == total and bool(_PER_LAYER.search(name))


def _is_period(name: str, value: Any, whole: dict[str, Any]) -> bool:
    if name == "attn_layer_period" and "layer_types" in whole:  # zamba also lists its layers
        return False
    return name == "block_types" or (name in _PERIODS and (value or 0) > 1)


def _of_layers(name: str, value: Any, whole: dict[str, Any], layers: list[int]) -> Any:
    """The value of a field about layers, for the kept layers."""
    total = whole.get("num_hidden_layers") or 0
    if name in _INDEX_LISTS:
        return [new for new, old in enumerate(layers) if old in value]
    if _is_per_layer(name, value, total):
        return [value[old] for old in layers]
    if name == "kv_source_layers":  # a layer whose source is not kept has keys and values of its own
        return [layers.index(value[old]) if value[old] in layers else new for new, old in enumerate(layers)]
    if name in _FIRST_LAYERS:
        return sum(old < value for old in layers)
    if name in _LAST_LAYERS:
        return sum(old >= total - value for old in layers)
    return value


def _original_positions(value: int, whole: dict[str, Any], sizes: dict[str, int]) -> int:
    """The same fraction of `max_position_embeddings`, but at least the length of sequences that twins run on."""
    if "positions" not in sizes:
        return value
    return max(32, sizes["positions"] * value // (whole.get("max_position_embeddings") or value))


def _rope(rope: dict[str, Any], whole: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Rope parameters for the tiny head, possibly nested by kind of layer."""
    tiny = {k: _rope(v, whole, sizes) if isinstance(v, dict) else v for k, v in rope.items()}
    head_dim = _tiny("head_dim", whole.get("head_dim") or 1, whole, sizes)
    rotated = sizes["head_dim"]
    factor = rope.get("partial_rotary_factor", whole.get("partial_rotary_factor"))
    if factor and head_dim == rotated:
        rotated = max(2, 2 * round(factor * head_dim / 2))  # pairs
    if rope.get("partial_rotary_factor"):
        tiny["partial_rotary_factor"] = rotated / head_dim
    half = rotated // 2
    for name in ("long_factor", "short_factor"):
        if rope.get(name):
            tiny[name] = [rope[name][i * len(rope[name]) // half] for i in range(half)]
    if rope.get("mrope_section"):
        whole_sections = rope["mrope_section"]
        middle, last = whole_sections[-2:]  # three, or four with an axis of images
        sections = [s * half // sum(whole_sections) for s in whole_sections]
        sections[0 if middle == last else -1] += half - sum(sections)  # height and width stay alike
        tiny["mrope_section"] = sections
    if positions := rope.get("original_max_position_embeddings"):
        tiny["original_max_position_embeddings"] = _original_positions(positions, whole, sizes)
    return tiny


def _sizes_of(tp: int, block: int) -> dict[str, int]:
    """Kind of size -> tiny value: 8 heads and 4 key/value heads if tp divides them, else 2 tp and tp."""
    kv_heads = 4 if 4 % tp == 0 else tp
    return _sizes(2 * kv_heads, kv_heads, _VOCABULARY, tp, block)


def _tiny_heads(value: int, heads: int | None, sizes: dict[str, int]) -> int:
    """The tiny count for `value` heads that are shared by `heads`."""
    if value == 1:
        return 1
    if value == heads:
        return sizes["heads"]
    if value % sizes["tp"] == 0 and sizes["kv_heads"] % sizes["tp"]:  # a mixer beside an attention with fewer heads
        return next(n for n in range(2, sizes["heads"] + 1) if sizes["heads"] % n == 0 == n % sizes["tp"])
    return sizes["kv_heads"]


def _tiny_groups(value: int, heads: int, tp: int) -> int:
    """The tiny number of groups of `heads` heads, shared by tp ranks as `value` groups are."""

    def character(number: int) -> tuple[bool, bool, bool]:
        return number == 1, number % tp == 0, tp % number == 0

    numbers = (n for n in range(min(value, max(4, tp)), 0, -1) if heads % n == 0)
    return next((n for n in numbers if character(n) == character(value)), 1)


def _least_like(value: int, tp: int, *, least: int, multiple: int) -> int:
    """The least number like `value` in divisibility by tp, parity and being a power of two."""

    def character(number: int) -> tuple[bool, bool, bool]:
        return number % tp == 0, number % 2 == 0, number & (number - 1) == 0

    candidates = (n for n in itertools.count(least) if n % multiple == 0)
    return next(n for n in candidates if character(n) == character(value))


def _sizes(heads: int, kv_heads: int, vocabulary: int, tp: int, block: int) -> dict[str, int]:
    head_dim = 8  # or more, if `block` requires it
    while heads * head_dim % (tp * block) and head_dim < 8 * tp * block:
        head_dim += 8
    hidden = heads * head_dim
    narrow = {"expert_inner": hidden // 2, "rank": hidden // 4, "head_rank": head_dim}
    return {
        "tp": tp,
        "hidden": hidden,
        "inner": 2 * hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "two_head_dims": 2 * head_dim,
        **{name: -(-size // block) * block for name, size in narrow.items()},
        "layers": 2,
        "vocabulary": vocabulary,
        "positions": 128,
        "window": 8,  # half of 16 tokens: a window over all would hide a wrong mask
        "image": 32,
    }
