"""Plain values with tensors at any depth, as one safetensors file: nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_TENSOR = "#tensor"  # stands for a tensor in the JSON; no module has this name


def write_values(values: dict[str, Any], path: Path) -> None:
    """Write plain values, lists, dicts and dataclasses, with tensors at any depth, as one safetensors file."""
    tensors: dict[str, Tensor] = {}

    def put(value: Any) -> dict[str, Any]:
        if not isinstance(value, Tensor):
            return vars(value)
        key = str(len(tensors))
        tensors[key] = value
        return {_TENSOR: key}

    described = json.dumps(values, default=put)
    save_file(tensors, path, metadata={"values": described})


def read_values(path: Path) -> dict[str, Any]:
    """Read a file of `write_values`, dataclasses as dicts."""
    with safe_open(path, framework="pt") as file:

        def get(found: dict[str, Any]) -> Any:
            return file.get_tensor(found[_TENSOR]) if _TENSOR in found else found

        values: dict[str, Any] = json.loads(file.metadata()["values"], object_hook=get)
    return values
