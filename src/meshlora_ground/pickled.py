"""Pickled files of tensors, of which nothing is run: `adapter_model.bin`, as PEFT wrote it before safetensors.

Does not own: what the tensors are.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from meshlora_ground.errors import UserError, reason

OLD_WEIGHTS = "adapter_model.bin"


def unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickled file by name: `unpickled(folder / OLD_WEIGHTS)`.

    Raises:
        UserError: it holds anything but plain tensors, or cannot be read.
    """
    if not file.is_file():
        raise UserError(f"{file}", "it is a folder, a pipe or a device, no file")
    way_out = "save the adapter as safetensors"
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # hostile pickles raise what they like
        rule = f"torch.load(weights_only=True) does not read it ({reason(error)})"
        raise UserError(f"{file}", rule, way_out) from error
    while isinstance(found, dict) and len(found) == 1 and isinstance(inner := next(iter(found.values())), dict):
        found = inner  # {"state_dict": {...}}
    if not isinstance(found, dict):
        raise UserError(f"{file}", "it is no dict from names to tensors", way_out)
    tensors = {f"{key}": value for key, value in found.items() if isinstance(value, Tensor)}
    for key, tensor in tensors.items():
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        # Strides of 0 make any number of values out of one.
        if not is_plain or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise UserError(f"{file}: {key}", "it is no plain tensor with its values", way_out)
    return tensors
