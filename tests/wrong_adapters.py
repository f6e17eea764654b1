"""Copies of an adapter's folder, each with one mistake of an engine or a converter."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_FILE, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


def edited(
    adapter: Path, out: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict, **config: object
) -> Path:
    """A copy with other tensors, or other values in its configuration."""
    shutil.copytree(adapter, out)
    tensors = change(load_file(adapter / _FILE))
    save_file({key: value.contiguous() for key, value in tensors.items()}, out / _FILE, metadata={"format": "pt"})
    stored = json.loads((out / _CONFIG).read_text())
    (out / _CONFIG).write_text(json.dumps(stored | config))
    return out


def alpha(adapter: Path) -> float:
    return float(json.loads((adapter / _CONFIG).read_text())["lora_alpha"])


def without(words: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """B is zero where the regular expression `words` is in a key: the same numbers as if it were not applied."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: torch.zeros_like(v) if "lora_B" in k and re.search(words, k) else v for k, v in tensors.items()}

    return change


def shifted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each layer has the factors of the layer before it, the first those of the last."""
    number = 1 + max(int(found[0]) for key in tensors if (found := _LAYER.search(key)))
    return {_LAYER.sub(lambda m: f"{(int(m[0]) + 1) % number}", key): value for key, value in tensors.items()}


def other_values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {k: torch.randn(v.shape, generator=generator) * v.std() for k, v in sorted(tensors.items())}


def exchanged(one: str, other: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        other_name = {one: other, other: one}
        return {
            re.sub(rf"\b({one}|{other})\b", lambda m: other_name[m[1]], key): value for key, value in tensors.items()
        }

    return change
