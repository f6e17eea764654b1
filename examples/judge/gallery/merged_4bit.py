"""PEFT merges into an nf4 base and rounds the sum again: a small update is lost between two of sixteen levels."""

from __future__ import annotations

from pathlib import Path

import torch
from common import run, with_adapter
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    given = {} if is_repaired else {"quantization_config": kind, "device_map": "cpu"}
    model = with_adapter(AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32, **given))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(1e-1)
    model.save_pretrained(folder / "adapter")
    merged = model.merge_and_unload()
    if not is_repaired:
        merged = merged.dequantize()
    merged.save_pretrained(folder / "merged")


if __name__ == "__main__":
    run(patient, ranks=1, hidden_size=64, intermediate_size=128)
