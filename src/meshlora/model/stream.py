"""Writing a safetensors file one tensor at a time, and reading it back.

Owns: the bytes of the format (8 bytes of header length, a JSON header, the data) and the check against those intended.
`safetensors.torch.save_file` needs all tensors of a file in memory at once; here the peak is one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshlora_ground.errors import MeshloraError
from meshlora_ground.files import open_safetensors

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NUM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}
_NUM_BYTES |= {"U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: `dtype` as safetensors writes it."""

    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        assert self.dtype in _NUM_BYTES, self
        return math.prod(self.shape) * _NUM_BYTES[self.dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "BF16"."""
    (found,) = [name for name, known in FLOATS.items() if known == dtype]
    return found


def write_stream(
    path: Path, entries: Sequence[Entry], read: Callable[[Entry], Tensor], metadata: Mapping[str, str]
) -> dict[str, str]:
    """Write `entries`, each read when its turn comes; returns key -> SHA-256 of the intended bytes."""
    # Widest types first, as safetensors does: every tensor is then aligned.
    ordered = sorted(entries, key=lambda e: (-_NUM_BYTES[e.dtype], e.key))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in ordered:
        end = offset + entry.num_bytes
        header[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned, as safetensors pads its header
    meant: dict[str, str] = {}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)  # the length of the header comes first
        for entry in ordered:
            tensor = read(entry)
            data = _bytes(tensor)
            assert tuple(tensor.shape) == entry.shape, (entry, tensor.shape)
            assert len(data) == entry.num_bytes, (entry, len(data))
            meant[entry.key] = hashlib.sha256(data).hexdigest()
            file.write(data)
            del tensor, data  # before the next is read
    return meant


def check_stream(path: Path, entries: Sequence[Entry], meant: Mapping[str, str]) -> None:
    """Read `path` back as any reader would; every tensor must be there and hold the intended bytes.

    Raises:
        MeshloraError: the file is not what was written.
    """
    with open_safetensors(path) as file:
        keys = set(file.keys())
    if keys != {entry.key for entry in entries}:
        raise MeshloraError(f"{path.name}: read back, its tensors are not those that were written")
    for entry in entries:
        with open_safetensors(path) as file:  # a new map for each, so that at most one tensor is in memory
            tensor = file.get_tensor(entry.key).clone()
        digest = hashlib.sha256(_bytes(tensor)).hexdigest()
        if tuple(tensor.shape) != entry.shape or digest != meant[entry.key]:
            raise MeshloraError(f"{path.name}: {entry.key}: read back, it differs from what was written")


def _bytes(tensor: Tensor) -> memoryview:
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
