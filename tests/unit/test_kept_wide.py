"""What transformers keeps in float32 in a half-precision model is float32 here too, with the values of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import meshlora
from meshlora_judge.twin import twin_config


@pytest.mark.parametrize("family", ["beam", "deepseek_v3", "flint", "llama", "nemotron_h", "qwen3_moe"])
def test_dtypes_and_values_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(twin_config(family), dtype=torch.float32)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.ndim <= 2:
            tensor.data = torch.randn_like(tensor) / 16  # not what bfloat16 can hold
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    lora = LoraConfig(r=2, target_modules=["o_proj"])
    ours = meshlora.load(tmp_path, lora=lora, dtype="bfloat16", device="cpu").state_dict()
    for name, tensor in theirs.items():
        if name in ours and ours[name].shape == tensor.shape:
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(ours[name], tensor), name
    wide = {name.rpartition(".")[2] for name, tensor in theirs.items() if tensor.dtype == torch.float32}
    assert bool(wide) == (family not in ("llama", "qwen3_moe")), wide
