"""Small checkpoints in the formats in which large models are published, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshlora.oracle.inputs import write_twin
from meshlora.plan.families.twin import twin_config

# Family -> what of its twin is another, so that there are several blocks along each dim.
FAMILIES: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64},
    "gpt_oss": {},
}
BLOCK = 32


def write_packed(folder: Path, family: str) -> Path:
    """A twin with linears in fp8, of gpt-oss experts in mxfp4; the rest in bfloat16."""
    write_twin(twin_config(family, **FAMILIES[family]), folder, dtype=torch.float32, seed=0)
    is_mx = family == "gpt_oss"
    packed: dict[str, Tensor] = {}
    for number, (key, value) in enumerate(sorted(load_file(folder / "model.safetensors").items())):
        if is_mx and key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed |= _mxfp4(key, value, seed=number)
        elif not is_mx and key.endswith("_proj.weight"):
            packed |= _fp8(key, value)
        else:
            packed[key] = value.bfloat16()
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    quantization: dict[str, Any] = {"quant_method": "mxfp4"} if is_mx else fp8
    config = json.loads(file.read_text()) | {"dtype": "bfloat16", "quantization_config": quantization}
    file.write_text(json.dumps(config))
    return folder


def _fp8(key: str, value: Tensor) -> dict[str, Tensor]:
    rows, columns = value.shape
    blocks = value.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    codes = (blocks / scales[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
    return {key: codes, f"{key}_scale_inv": scales}


def _mxfp4(key: str, value: Tensor, *, seed: int) -> dict[str, Tensor]:
    experts, inputs, outputs = value.shape
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    return {f"{key}_blocks": blocks, f"{key}_scales": scales}
