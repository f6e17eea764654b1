"""Bases, adapters as PEFT saves them, and both together, for tests of what is made of their files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from meshlora_judge.twin import twin_config


def make_base(
    folder: Path, family: str, dtype: torch.dtype = torch.float32, *, shard: str = "5GB", **sizes: Any
) -> Path:
    """A twin on disk, its norms and biases off their defaults."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(twin_config(family, **sizes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def save_adapter(base: Any, folder: Path, *, of_a: float = 0.1, of_b: float = 0.1, **lora: Any) -> Path:
    """The adapter of `lora` on `base`, every trained parameter moved from where it starts. of_a, of_b: how far all but
    B, and B."""
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(base, LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM"} | lora))
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=of_b if "lora_B" in name else of_a)
        wrapped.save_pretrained(folder)
    return folder


def with_adapter(base: Any, adapter: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(base, str(adapter))
