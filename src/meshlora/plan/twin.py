"""Twins: the same `model_type` with tiny sizes, built from the configuration class alone.

Owns: the sizes, and what single families need besides. A twin has at least one layer of each kind its family has.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from meshlora.errors import UserError, did_you_mean

# 8 heads and 4 key/value heads divide by tp=4; head_dim 8 * 8 heads = hidden_size.
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# The gated delta rule mixers: one layer of each kind.
_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

_BY_FAMILY: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 8},
    "vaultgemma": {"query_pre_attn_scalar": 8, "sliding_window": 8},
    "olmo_hybrid": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
}


def twin_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    """The twin's configuration: dropouts 0, sizes of this file, then `overrides`.

    Raises:
        UserError: transformers has no such model type.
    """
    if model_type not in CONFIG_MAPPING:
        raise UserError(
            f"model_type {model_type!r}", "transformers has no such family", did_you_mean(model_type, CONFIG_MAPPING)
        )
    cls = CONFIG_MAPPING[model_type]
    accepted = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set(_SIZES)
    renamed = getattr(cls, "attribute_map", {})
    sizes = {k: v for k, v in _SIZES.items() if k in accepted or renamed.get(k) in accepted}
    config = cls(**{**sizes, **_BY_FAMILY.get(model_type, {}), **overrides})
    for name, value in config.to_dict().items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config
