"""Tiny models with experts, and adapters of every kind on them: what tests of the export for serving engines use."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from meshlora.loading.blueprint import read_model_config
from meshlora_ground.topology import Topology
from tests.blueprints import build_meta
from tests.unit.test_expert_format import OWN, SIZES, logits_of, random

E, R, HIDDEN, INNER = 4, 3, 32, 24
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
FAMILIES: dict[str, dict[str, Any]] = {
    **OWN,
    # The first layer is dense, the second has shared experts beside the routed ones.
    "deepseek_v3": {
        "intermediate_size": 48,
        "moe_intermediate_size": INNER,
        "n_routed_experts": E,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "nemotron_h": {
        "layers_block_type": ["attention", "moe"],
        "moe_intermediate_size": INNER,
        "n_routed_experts": E,
        "n_group": 1,
        "topk_group": 1,
        "intermediate_size": 48,
    },
    "phimoe": {"intermediate_size": INNER, "num_local_experts": E},
    "granitemoe": {"intermediate_size": INNER, "num_local_experts": E},
    "llama": {"intermediate_size": 48},
}


def twin(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def meta(model: Path) -> dict[str, Any]:
    config = read_model_config(model)
    hf_model, plan = build_meta(config, Topology.parse(""), dtype=torch.float32, disable_dropout=True)
    return {"model": hf_model, "plan": plan}


def make_adapter(family: str, folder: Path, **lora: Any) -> Path:
    """An adapter that PEFT saved, with random factors."""
    config = LoraConfig(**{"r": R, "lora_alpha": 2 * R, "target_modules": [], "task_type": "CAUSAL_LM"} | lora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(twin(family), config)
        for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter.data = 0.1 * random(*parameter.shape, seed=index)
        model.save_pretrained(folder)
    return folder


def change(folder: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    save_file({key: t.contiguous() for key, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    stored = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(stored | config))


def make_pieces(folder: Path, pieces: list[str]) -> Path:
    """Of qwen3_moe: an adapter on gate, up or both, each with an A of its own, in block form."""
    rank = R * len(pieces)
    patterns = {"rank_pattern": {".*gate_up_proj": rank}, "alpha_pattern": {".*gate_up_proj": 2 * rank}}
    make_adapter("qwen3_moe", folder, target_parameters=BOTH, **patterns)
    tensors = load_file(folder / WEIGHTS)
    for key in [key for key in tensors if key.endswith("base_layer.lora_B.weight")]:
        b = tensors[key].reshape(2, INNER, len(pieces), R, E).clone()  # the expert is the fast index
        for row, half in enumerate(("gate", "up")):
            for column, piece in enumerate(pieces):
                b[row, :, column] *= half == piece
        tensors[key] = b.reshape(2 * INNER, rank * E)
    change(folder, tensors)
    (folder / "meshlora.json").write_text(json.dumps({"pieces": {"experts.gate_up_proj": pieces}}))
    return folder


def make_shared(folder: Path) -> Path:
    """Of qwen3_moe: one adapter for all experts of a layer."""
    make_adapter("qwen3_moe", folder, target_parameters=BOTH)
    tensors = load_file(folder / WEIGHTS)
    for key, tensor in tensors.items():
        if "lora_A" in key:
            tensors[key] = tensor[:R].repeat(E, 1)
        else:
            tensors[key] = tensor.reshape(len(tensor), R, E)[:, :, :1].repeat(1, 1, E).flatten(1)
    change(folder, tensors)
    (folder / "meshlora.json").write_text(json.dumps({"pieces": {}, "share_experts": True}))
    return folder


KINDS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "qwen3_moe": (
        "qwen3_moe",
        lambda f: make_adapter("qwen3_moe", f, target_modules=["q_proj", "o_proj"], target_parameters=BOTH),
    ),
    "mixtral": ("mixtral", lambda f: make_adapter("mixtral", f, target_modules=["v_proj"], target_parameters=BOTH)),
    "gate_up_alone": ("mixtral", lambda f: make_adapter("mixtral", f, target_parameters=BOTH[:1])),
    "down_alone": ("mixtral", lambda f: make_adapter("mixtral", f, target_parameters=BOTH[1:])),
    "one_layer": (
        "qwen3_moe",
        lambda f: make_adapter(
            "qwen3_moe",
            f,
            target_modules=["model.layers.0.self_attn.q_proj"],
            target_parameters=[f"model.layers.1.mlp.{name}" for name in BOTH],
        ),
    ),
    "layers_that_differ": (
        "qwen3_moe",
        lambda f: make_adapter(
            "qwen3_moe", f, target_parameters=["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
        ),
    ),
    "dense_and_shared_experts": (
        "deepseek_v3",
        lambda f: make_adapter(
            "deepseek_v3",
            f,
            target_modules=["q_b_proj", "o_proj"],
            target_parameters=[
                *BOTH,
                *(f"model.layers.0.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
                "model.layers.1.mlp.shared_experts.down_proj.weight",
            ],
        ),
    ),
    "no_gate": (
        "nemotron_h",
        lambda f: make_adapter("nemotron_h", f, target_parameters=["experts.up_proj", "experts.down_proj"]),
    ),
    "embedding_and_head": (
        "qwen3_moe",
        lambda f: make_adapter("qwen3_moe", f, target_modules=["embed_tokens", "lm_head"], target_parameters=BOTH),
    ),
    "rslora": ("mixtral", lambda f: make_adapter("mixtral", f, target_parameters=BOTH, use_rslora=True)),
    "gate_and_up": ("qwen3_moe", lambda f: make_pieces(f, ["gate", "up"])),
    "up": ("qwen3_moe", lambda f: make_pieces(f, ["up"])),
    "shared": ("qwen3_moe", lambda f: make_shared(f)),
}


def same_tensors(one: Path, other: Path) -> bool:
    a, b = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def peft_logits(family: str, adapter: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of patterns that PEFT follows, and of layers without an adapter
        return logits_of(PeftModel.from_pretrained(twin(family), adapter, autocast_adapter_dtype=False))
