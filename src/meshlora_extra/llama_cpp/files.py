"""GGUF files: which families, their names and rows in llama.cpp, writing tensor by tensor, and reading back.

Owns: the order of rows of query and key, the types on disk, the Modelfile beside. Does not own: what is written
(`llama_cpp.adapter`, `llama_cpp.model`).

llama.cpp rotates neighbouring features of a head in its `llama` architecture, transformers the first half with the
second: the rows of query and key are written in the other order, as its convert_hf_to_gguf.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from meshlora_ground.errors import MeshloraError, UnsupportedError, UserError
from meshlora_ground.files import write_atomically, write_text_atomically

SUFFIX = ".gguf"
# model_type -> llama.cpp's architecture, all with RMS norms, gated MLPs and rotary embeddings of whole heads.
ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
_CONVERT = "convert_hf_to_gguf.py of llama.cpp may know it, after meshlora merge"
# Attention of some tokens alone, and another activation, which these architectures do not have in llama.cpp.
_SLIDING, _ACTIVATION = "sliding_attention", "silu"


@dataclass(frozen=True)
class Entry:
    """A tensor to write. shape, dtype: as it is in memory. read: gives it, once for each call."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def library() -> Any:
    """The package `gguf`. Raises: UserError: it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError("--layout gguf", "it needs the package gguf", "pip install 'meshlora[gguf]'") from None
    return gguf


class Names:
    """The names of a model's parameters in llama.cpp.

    Raises:
        UnsupportedError: a family, or a model of it, that llama.cpp would compute otherwise.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        gguf, self.config = library(), config
        if config.model_type not in ARCHITECTURES:
            rule = f"GGUF files are written of {', '.join(ARCHITECTURES)}"
            raise UnsupportedError(f"--layout gguf of {config.model_type!r}", rule, _CONVERT)
        if _SLIDING in (getattr(config, "layer_types", None) or ()) or _slides(config):
            raise UnsupportedError("--layout gguf", "the model has sliding windows, which would be dropped", _CONVERT)
        if config.hidden_act != _ACTIVATION:
            raise UnsupportedError(f"--layout gguf: hidden_act={config.hidden_act}", "it would become silu", _CONVERT)
        number = gguf.MODEL_ARCH[ARCHITECTURES[config.model_type]]
        self.architecture: str = gguf.MODEL_ARCH_NAMES[number]
        self._map = gguf.get_tensor_name_map(number, config.num_hidden_layers)
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def of(self, name: str) -> str:
        """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
        found: str | None = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UnsupportedError(
                f"--layout gguf: {name}", "llama.cpp has no place for it", "merge it: meshlora merge"
            )
        return found

    def in_order(self, name: str, rows: Tensor) -> Tensor:
        """`rows` `[out, ...]` of the parameter `name` in llama.cpp's order."""
        heads = self.config.num_attention_heads
        if ".k_proj" in name:
            heads = self.config.num_key_value_heads
        elif ".q_proj" not in name:
            return rows
        if self.architecture != "llama":
            return rows
        return rows.view(heads, 2, self.head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _slides(config: PretrainedConfig) -> bool:
    """Whether a window is on in a family that has no list of layers."""
    window = getattr(config, "sliding_window", None)
    return bool(window) and not getattr(config, "layer_types", None) and getattr(config, "use_sliding_window", True)


def write_gguf(
    out: Path, names: Names, tensors: Mapping[str, Entry], describe: Callable[[Any], None], *, base: str
) -> None:
    """Write `tensors`, by their names in llama.cpp, as `out`, one at a time, and read all of them back.

    describe: adds the metadata to gguf's writer. base: what the Modelfile beside begins from.

    Raises:
        MeshloraError: what was read back differs.
    """
    gguf = library()

    def write(path: Path) -> None:
        writer = gguf.GGUFWriter(None, names.architecture)
        describe(writer)
        for name, entry in tensors.items():
            found = _stored(torch.empty(entry.shape, dtype=entry.dtype))
            kind = gguf.GGMLQuantizationType[_kind(entry)]
            writer.add_tensor_info(name, found.shape, found.dtype, found.nbytes, raw_dtype=kind)
        try:
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for entry in tensors.values():
                writer.write_tensor_data(_stored(entry.read()))
        finally:
            writer.close()
        _compare(path, tensors)  # before it appears under its name

    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, write)
    adapter = f"ADAPTER ./{out.name}\n" if base else ""
    write_text_atomically(modelfile(out), f"FROM {base or f'./{out.name}'}\n{adapter}")


def modelfile(out: Path) -> Path:
    """The Modelfile beside `out`: `ollama create mine -f mine.Modelfile`."""
    return out.with_suffix(".Modelfile")


def check_new(out: Path) -> None:
    """Refuse a path that exists or has another suffix. Raises: UserError."""
    if out.suffix != SUFFIX:
        raise UserError(f"--out {out}", f"layout gguf is one file whose name ends in {SUFFIX}")
    for path in (out, modelfile(out)):
        if path.exists():
            raise UserError(f"--out {out}", f"{path} is there already, and nothing is overwritten", "give another name")


def _kind(entry: Entry) -> str:
    """The type on disk, by gguf's name: that of the tensor, float32 for vectors and for wider numbers."""
    if len(entry.shape) > 1 and entry.dtype in (torch.bfloat16, torch.float16):
        return "BF16" if entry.dtype == torch.bfloat16 else "F16"
    return "F32"


def _stored(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The numbers as they lie on disk; numpy knows no bfloat16, whose bytes these are."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.ndim > 1 and tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint8).numpy()
    if tensor.ndim > 1 and tensor.dtype == torch.float16:
        return tensor.numpy()
    return tensor.float().numpy()


def _compare(path: Path, tensors: Mapping[str, Entry]) -> None:
    there = {found.name: found for found in library().GGUFReader(path).tensors}
    if there.keys() != tensors.keys():
        raise MeshloraError(f"{path}: read back, it has other tensors than were written")
    for name, entry in tensors.items():
        if there[name].tensor_type.name != _kind(entry) or not np.array_equal(there[name].data, _stored(entry.read())):
            raise MeshloraError(f"{path}: read back, {name} differs from what was written")
