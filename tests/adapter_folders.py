"""Adapters as PEFT itself trains and saves them, on random models of a few thousand parameters of many families."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import (
    AdaLoraConfig,
    EvaConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    VeraConfig,
    get_peft_model,
    initialize_lora_eva_weights,
)
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True)
class Recipe:
    """A family with its sizes, an adapter on it, and how it is trained.

    Attributes:
        family: transformers' model_type. sizes: besides or in place of SMALL's. auto: transformers' class.
        lora: of LoraConfig. steps: of the optimizer. length: of the sequences. change: to the model before training.
    """

    family: str = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)
    auto: str = "AutoModelForCausalLM"
    lora: dict[str, Any] = field(default_factory=lambda: {"target_modules": "all-linear"})
    dtype: torch.dtype = torch.float32
    steps: int = 2
    length: int = 12
    optimizer: str = "AdamW"
    kind: Callable[..., Any] = LoraConfig
    adapters_dtype: bool = True
    resize: int = 0
    is_eva: bool = False


def make(recipe: Recipe, folder: Path) -> tuple[Path, Path]:
    """(folder of the adapter, folder of its base), trained for some steps and saved by PEFT."""
    with warnings.catch_warnings():  # PEFT's own, about tied and saved embeddings among others
        warnings.simplefilter("ignore")
        return _make(recipe, folder)


def _make(recipe: Recipe, folder: Path) -> tuple[Path, Path]:
    torch.manual_seed(0)
    sizes = recipe.sizes if recipe.sizes.get("own") else SMALL | recipe.sizes
    sizes = {name: value for name, value in sizes.items() if name != "own"}
    config = transformers.AutoConfig.for_model(recipe.family, **sizes)
    model = getattr(transformers, recipe.auto).from_config(config, dtype=recipe.dtype)
    model.save_pretrained(folder / "base")
    model.config._name_or_path = model.name_or_path = str(folder / "base")
    if recipe.resize:
        model.resize_token_embeddings(recipe.resize)
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8} if recipe.kind is LoraConfig else {}
    peft_model = get_peft_model(
        model, recipe.kind(**options | recipe.lora), autocast_adapter_dtype=recipe.adapters_dtype
    )
    inputs = _inputs(recipe, config)
    if recipe.is_eva:
        initialize_lora_eva_weights(peft_model, [inputs] * 2, show_progress_bar=False)
    trained = [each for each in peft_model.parameters() if each.requires_grad]
    optimizer = getattr(torch.optim, recipe.optimizer)(trained, lr=1e-2)
    for _ in range(recipe.steps):
        optimizer.zero_grad()
        output = peft_model(**inputs)
        loss = output.loss if "labels" in inputs else output[0].float().square().mean()
        loss.backward()
        optimizer.step()
    peft_model.save_pretrained(folder / "adapter")
    return folder / "adapter", folder / "base"


def _inputs(recipe: Recipe, config: Any) -> dict[str, Tensor]:
    if recipe.auto in ("AutoModelForImageClassification", "AutoModelForSemanticSegmentation"):
        pixels = torch.randn(2, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    ids = torch.randint(4, 60, (2, recipe.length))
    if recipe.auto == "AutoModelForSequenceClassification":
        return {"input_ids": ids, "labels": torch.tensor([0, 1])}
    if recipe.auto == "AutoModelForSpeechSeq2Seq":
        return {"input_features": torch.randn(2, config.num_mel_bins, 32), "labels": ids}
    if recipe.auto == "AutoModel":
        return {"input_ids": ids}
    return {"input_ids": ids, "labels": ids}


def _lora(**options: Any) -> dict[str, Any]:
    return {"target_modules": ATTENTION, "task_type": "CAUSAL_LM"} | options


MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN_MOE = Recipe("qwen3_moe", MOE)
_GPT2 = {"own": True, "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_BERT = {**SMALL, "own": True, "pad_token_id": 0, "num_labels": 2}
_VIT = {**_BERT, "image_size": 16, "patch_size": 8, "num_channels": 3}
_T5 = {"own": True, "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_GEMMA3N = {
    **SMALL,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": [48] * 6,
    "activation_sparsity_pattern": [0.0] * 6,
    "laurel_rank": 4,
}
_DEEPSEEK = {
    **MOE,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}

_WHISPER = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_NEXT = {
    **MOE,
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_BAMBA = {
    "num_hidden_layers": 4,
    "attn_layer_indices": [2],
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_NEMOTRON = {
    **_BAMBA,
    "num_hidden_layers": 5,
    "layers_block_type": ["mamba", "attention", "mamba", "mlp", "mamba"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
}

SOUND: dict[str, Recipe] = {
    "llama": Recipe(),
    "one step": Recipe(steps=1),
    "SGD": Recipe(optimizer="SGD"),
    "rank 1": Recipe(lora=_lora(r=1)),
    "one module": Recipe(lora=_lora(target_modules=["v_proj"], r=1)),
    "odd sizes": Recipe(
        sizes={"intermediate_size": 51, "vocab_size": 67}, lora=_lora(target_modules="all-linear", r=3)
    ),
    "embedding": Recipe(lora=_lora(target_modules=["embed_tokens", "q_proj"])),
    "head": Recipe(lora=_lora(target_modules=["lm_head", "q_proj"])),
    "tied": Recipe(sizes={"tie_word_embeddings": True}, lora=_lora(target_modules=["embed_tokens", "v_proj"])),
    "tied and saved": Recipe(
        sizes={"tie_word_embeddings": True}, lora=_lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    ),
    "modules to save": Recipe(lora=_lora(modules_to_save=["lm_head", "embed_tokens"])),
    "tokens": Recipe(lora=_lora(trainable_token_indices=[3, 5, 7])),
    "more tokens": Recipe(resize=70, lora=_lora(modules_to_save=["lm_head", "embed_tokens"])),
    "dora": Recipe(lora=_lora(use_dora=True)),
    "rslora": Recipe(lora=_lora(use_rslora=True, r=8)),
    "patterns": Recipe(
        lora=_lora(rank_pattern={"q_proj": 2, "layers.1.self_attn.v_proj": 6}, alpha_pattern={"q_proj": 32})
    ),
    "bias of B": Recipe(lora=_lora(lora_bias=True)),
    "biases": Recipe("qwen2", lora=_lora(bias="lora_only")),
    "gaussian": Recipe(lora=_lora(init_lora_weights="gaussian")),
    "random B": Recipe(lora=_lora(init_lora_weights=False)),
    "pissa": Recipe(lora=_lora(init_lora_weights="pissa")),
    "olora": Recipe(lora=_lora(init_lora_weights="olora")),
    "orthogonal": Recipe(lora=_lora(init_lora_weights="orthogonal")),
    "eva": Recipe(lora=_lora(init_lora_weights="eva", eva_config=EvaConfig(rho=2.0)), is_eva=True),
    "some layers": Recipe(sizes={"num_hidden_layers": 4}, lora=_lora(layers_to_transform=[1, 3])),
    "regex": Recipe(
        sizes={"num_hidden_layers": 4}, lora=_lora(target_modules=r".*\.([0-3]\.mlp\.up|[0-2]\.mlp\.gate)_proj")
    ),
    "named one by one": Recipe(
        sizes={"num_hidden_layers": 4},
        lora=_lora(target_modules=["up_proj", *(f"layers.{number}.mlp.gate_proj" for number in range(3))]),
    ),
    "without": Recipe(sizes={"num_hidden_layers": 4}, lora=_lora(exclude_modules=r".*layers\.2\..*o_proj")),
    "bfloat16": Recipe(dtype=torch.bfloat16, adapters_dtype=False),
    "float16": Recipe(dtype=torch.float16, adapters_dtype=False, optimizer="SGD"),
    "float64": Recipe(dtype=torch.float64),
    "one token": Recipe(length=2),
    "gpt2": Recipe("gpt2", _GPT2, lora={"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt_neox": Recipe("gpt_neox", lora={"target_modules": ["query_key_value", "dense"]}),
    "phi3": Recipe("phi3", {"pad_token_id": 0}),
    "qwen3 experts": Recipe("qwen3_moe", MOE, lora=_lora(target_parameters=STACKS)),
    "down alone": Recipe("qwen3_moe", MOE, lora=_lora(target_parameters=STACKS[1:], r=2)),
    "experts barely reached": Recipe(
        "qwen3_moe",
        MOE | {"num_experts": 16, "num_local_experts": 16},
        lora=_lora(target_modules=[], target_parameters=STACKS),
        length=3,
    ),
    "mixtral by old names": Recipe("mixtral", MOE, lora=_lora(target_modules=["q_proj", "w1", "w2", "w3"])),
    "mixtral experts": Recipe("mixtral", MOE, lora=_lora(target_parameters=STACKS)),
    "gpt_oss experts": Recipe("gpt_oss", MOE, lora=_lora(target_parameters=STACKS)),
    "deepseek": Recipe("deepseek_v3", _DEEPSEEK),
    "gemma3n, layers that share keys": Recipe("gemma3n_text", _GEMMA3N, lora=_lora()),
    "a composite whose images no text shows": Recipe(
        "gemma3",
        {"own": True, "text_config": SMALL, "vision_config": _VISION, "mm_tokens_per_image": 4},
        auto="AutoModelForImageTextToText",
    ),
    "bert": Recipe(
        "bert",
        _BERT,
        auto="AutoModelForSequenceClassification",
        lora={"target_modules": ["query", "value"], "task_type": "SEQ_CLS"},
    ),
    "t5": Recipe(
        "t5", _T5, auto="AutoModelForSeq2SeqLM", lora={"target_modules": ["q", "v", "wo"], "task_type": "SEQ_2_SEQ_LM"}
    ),
    "vit": Recipe(
        "vit",
        _VIT,
        auto="AutoModelForImageClassification",
        lora={"target_modules": "all-linear", "modules_to_save": ["classifier"]},
    ),
    "whisper": Recipe(
        "whisper",
        {**_WHISPER, "own": True},
        auto="AutoModelForSpeechSeq2Seq",
        lora={"target_modules": ["q_proj", "v_proj", "fc1"]},
    ),
    "lfm2": Recipe("lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}),
    "qwen3_next": Recipe("qwen3_next", _NEXT),
    "bamba": Recipe("bamba", _BAMBA),
    "nemotron_h": Recipe(
        "nemotron_h", _NEMOTRON, lora=_lora(target_modules=[*ATTENTION, "in_proj", "up_proj", "down_proj"])
    ),
    "llama4 experts": Recipe(
        "llama4_text",
        MOE | {"intermediate_size_mlp": 48},
        lora=_lora(target_parameters=["feed_forward.experts.down_proj"]),
    ),
    "ia3": Recipe(
        kind=IA3Config, lora={"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    ),
    "loha": Recipe(kind=LoHaConfig, lora={"target_modules": ATTENTION}),
    "vera": Recipe(kind=VeraConfig, lora={"target_modules": ["q_proj", "o_proj"]}),
    "adalora": Recipe(kind=AdaLoraConfig, lora={"target_modules": ATTENTION, "total_step": 10}),
    "convnext": Recipe(
        "convnext",
        {"own": True, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32, "num_labels": 2},
        auto="AutoModelForImageClassification",
        lora={"target_modules": ["pwconv1", "pwconv2", "patch_embeddings"]},
    ),
}


def files(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, name: str = WEIGHTS) -> Path:
    """A folder with these tensors, and a configuration if there is one."""
    folder.mkdir(exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    if config is not None:
        (folder / CONFIG).write_text(json.dumps(config))
    return folder
