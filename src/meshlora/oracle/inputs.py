"""What both sides start from: a twin on disk, and an adapter with A and B non-zero. Made by transformers and peft.

Owns: their values, pure functions of (seed, name). Also the judge's own copy of the rule by which meshlora draws fresh
adapters: written a second time, from the words of docs/oracle.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from meshlora.oracle.pieces import mask_of, pieces_of

_PREFIX = "base_model.model."


def write_twin(config: PretrainedConfig, folder: Path, *, dtype: torch.dtype, seed: int) -> None:
    """A checkpoint with random weights; norms are moved off 1 and biases off 0, which would hide faults."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.to(dtype).save_pretrained(folder)


def write_adapter(
    model: str | Path,
    lora: Mapping[str, Any],
    folder: Path,
    *,
    seed: int,
    trust_remote_code: bool,
    pieces: dict[str, list[str]] | None = None,
) -> None:
    """The adapter that PEFT makes of `lora` on the model, with values drawn by name: A and B both non-zero."""
    pieces = pieces or {}
    config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        peft_model = get_peft_model(base, LoraConfig(**lora))
    stored = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    shapes = {key: tensor.shape for key, tensor in stored.items()}
    folder.mkdir(parents=True)
    peft_model.peft_config["default"].save_pretrained(str(folder))
    drawn = {key: _draw(seed, key, tuple(shape)) for key, shape in shapes.items()}
    for key, value in drawn.items():
        module, _, part = key.removeprefix(_PREFIX).rpartition(".lora_")
        if part == "B.weight" and (names := pieces_of(module, pieces)):
            value *= mask_of(config, module, names, (value.shape[0], value.shape[1]))
    if pieces:
        (folder / "meshlora.json").write_text(json.dumps({"pieces": pieces}), encoding="utf-8")
    save_file(drawn, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _draw(seed: int, key: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:  # a magnitude, a norm or a bias: around 1, around 0
        return torch.randn(shape, generator=_generator(f"verify:{seed}:{key}")) * 0.1 + (not key.endswith("bias"))
    # B is small beside A: the adapter is far above rounding, but a deep model with it still computes finite numbers.
    scale = (0.25 if ".lora_B" in key or ".lora_embedding_B" in key else 1.0) / math.sqrt(shape[-1])
    return torch.randn(shape, generator=_generator(f"verify:{seed}:{key}")) * scale


def expected_fresh(name: str, shape: tuple[int, ...], *, init: bool | str, seed: int) -> Tensor:
    """The factor `name`, as in `model.layers.0.mlp.up_proj.lora_A`, of a fresh adapter, whole.

    A is uniform in ±1/sqrt(in_features), or N(0, 1/r^2) for "gaussian"; B is zero, or uniform in ±1/sqrt(r) where
    `init` is False. On an embedding A is zero and B N(0, 1), or both N(0, 1). The generator's seed is the first 8 bytes
    of sha256("{seed}:{name}"), halved. On pieces each has a name: `c_attn.lora_A.q`.
    """
    generator = _generator(f"{seed}:{name}")
    part = name.rpartition(".lora_")[2].partition(".")[0]
    if part.startswith("embedding"):
        return (
            torch.zeros(shape) if part.endswith("A") and init is not False else torch.randn(shape, generator=generator)
        )
    if part == "B" and init is not False:
        return torch.zeros(shape)
    if init == "gaussian" and part == "A":
        return torch.randn(shape, generator=generator) / shape[0]
    return (torch.rand(shape, generator=generator) * 2 - 1) * (1 / math.sqrt(shape[1]))


def _generator(text: str) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") // 2
    return torch.Generator().manual_seed(seed)
