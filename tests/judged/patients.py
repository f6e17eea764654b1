"""What is trained here: a tiny llama with a tokenizer, rows of unequal length, an adapter whose B is not 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LENGTHS = (9, 5, 12, 7, 4, 11, 6, 3, 8, 10, 5, 6)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_model(folder: Path, dtype: torch.dtype = torch.float64) -> Path:
    """A llama of two layers, in float64 so that a difference is a fault, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=97, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype=dtype, **sizes
    )
    model = LlamaForCausalLM(config).to(dtype)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)  # else attention is flat
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{place}": place for place in range(3, 97)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def base_of(folder: Path, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype, **options)


def lora_config(**changed: Any) -> Any:
    from peft import LoraConfig

    options = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**options | {"init_lora_weights": False} | changed)


def with_adapter(model: Any, **changed: Any) -> Any:
    """PEFT's model, its factors the same on every rank."""
    from peft import get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, lora_config(**changed), autocast_adapter_dtype=False).train()


def rows(step: int) -> list[dict[str, Any]]:
    """Token ids of unequal length; the first third has no label."""
    generator, found = torch.Generator().manual_seed(step), []
    for length in LENGTHS:
        ids = torch.randint(3, 97, (length,), generator=generator).tolist()
        labels = [-100] * (length // 3) + ids[length // 3 :]
        found.append({"input_ids": ids, "labels": labels})
    return found


def collated(part: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded on the right."""
    longest = max(len(row["input_ids"]) for row in part)
    found = {name: [] for name in ("input_ids", "attention_mask", "labels")}
    for row in part:
        missing = longest - len(row["input_ids"])
        found["input_ids"].append(row["input_ids"] + [0] * missing)
        found["attention_mask"].append([1] * len(row["input_ids"]) + [0] * missing)
        found["labels"].append(row["labels"] + [-100] * missing)
    return {name: torch.tensor(value) for name, value in found.items()}


def micro_batches(step: int, rank: int, world: int, size: int = 2) -> tuple[list[dict[str, Tensor]], int]:
    """(this rank's of one step, the number of trained tokens on all ranks)."""
    every = rows(step)
    own = every[rank::world]
    total = sum(label != -100 for row in every for label in row["labels"][1:])
    return [collated(own[place : place + size]) for place in range(0, len(own), size)], total
