"""An adapter's folder, opened: its configuration and its tensors, read one at a time.

Owns: which file of a folder holds the tensors, and the refusal of what holds none that can be read.
Does not own: what names mean (`adapter_files.names`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from meshlora_ground.errors import MeshloraError, UserError, reason
from meshlora_ground.files import open_safetensors, read_json
from meshlora_ground.pickled import OLD_WEIGHTS, unpickled
from meshlora_judge.adapter_files.names import Names, names_of

CONFIG, OWN = "adapter_config.json", "meshlora.json"
_OF_PEFT = ("adapter_model.safetensors", OLD_WEIGHTS)
_PICKLED = (".bin", ".pt", ".pth")
_LARGEST = 1e9
_MOST_BYTES = 2**37  # twice the largest adapter that can be named: all experts of a trillion parameters at rank 64
# Files or folders of checkpoints that hold parts of tensors: whose -> what to do.
_DCP = "torch.distributed.checkpoint.format_utils.dcp_to_torch_save makes one file of it"
_MEGATRON = "export it to PEFT's format with the trainer's own converter (Megatron-Bridge: export_adapter)"
_IN_PARTS = {
    ".metadata": _DCP,
    "*.distcp": _DCP,
    "mp_rank_*": _MEGATRON,
    "iter_*": _MEGATRON,
    "global_step*": "zero_to_fp32.py, which lies beside it, makes one file of it",
    "adapter_model-*-of-*": "PEFT reads one file: save it again with save_pretrained",
}


@dataclass
class Adapter:
    """A folder that is open.

    Attributes:
        config: of PEFT; {} where another layout has none. own: meshlora's options. file: that holds the tensors.
        read: gives the tensor of a key.
    """

    folder: Path
    file: Path
    config: Mapping[str, Any]
    own: Mapping[str, Any]
    names: Names
    read: Callable[[str], Tensor]

    @property
    def is_lora(self) -> bool:
        return str(self.config.get("peft_type", "LORA")).upper() == "LORA"


@contextlib.contextmanager
def open_adapter(folder: Path) -> Iterator[Adapter]:
    """Open the adapter in `folder`. Raises: UserError: it is none, or its files cannot be read. MeshloraError: it
    is empty."""
    try:
        if not folder.is_dir():
            raise UserError(f"{folder}", "it is no folder", "give the folder that an adapter was saved in")
        there = {file.name for file in folder.iterdir()}
    except OSError as error:
        raise UserError(f"{folder}", f"it cannot be read ({error.strerror or error})") from None
    file = _file_of(folder, there)
    config = _checked(folder / CONFIG) if CONFIG in there else None
    own = _object(folder / OWN) if OWN in there else {}
    with _opened(file) as (keys, read):
        if not keys:
            # What savers leave under ZeRO-3 and torch.compile: a fault of theirs, no folder given by mistake.
            way = "save the adapter again with save_pretrained of the unwrapped PeftModel"
            raise MeshloraError(f"{folder}: cannot be what was trained. {file.name} holds no tensor; {way}.")
        names = names_of(keys, config, there)
        if config is None and not any(part.side for part in names.parts):
            rule = f"none of its {len(keys):,} tensors is a factor of LoRA in a layout known here"
            raise UserError(f"{file}", rule, "give the folder that an adapter, not a model, was saved in")
        if config is None and names.is_peft:
            raise UserError(f"{folder / CONFIG}", "the file is missing", "PEFT writes it beside the tensors")
        yield Adapter(folder, file, config or {}, own, names, read)


def _file_of(folder: Path, there: set[str]) -> Path:
    for name in _OF_PEFT:
        if name in there:
            return folder / name
    for pattern, way_out in _IN_PARTS.items():
        if any(folder.glob(pattern)):
            raise UserError(f"{folder}", f"its tensors are in parts ({pattern}), which are not read here", way_out)
    if CONFIG not in there:
        for suffix in (".safetensors", *_PICKLED):
            named = sorted(name for name in there if name.endswith(suffix))
            adapters = [name for name in named if "adapter" in name or "lora" in name] or named
            if len(adapters) == 1:
                return folder / adapters[0]
            if adapters:
                rule = f"it holds {len(adapters)} files of tensors, first {adapters[0]}"
                raise UserError(f"{folder}", rule, "put the adapter alone into a folder")
    rule = f"it holds no {_OF_PEFT[0]} and no {_OF_PEFT[1]}"
    raise UserError(f"{folder}", rule, "give the folder that an adapter was saved in")


def _object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}", "it must be a JSON object, as PEFT writes it")
    return value


def _checked(path: Path) -> dict[str, Any]:
    """A configuration whose fields that are used here have their types."""
    config = _object(path)
    types: dict[str, tuple[type, ...]] = {"r": (int,), "lora_alpha": (int, float), "peft_type": (str,)}
    types |= {"rank_pattern": (dict,), "alpha_pattern": (dict,), "target_modules": (list, str)}
    types |= {"target_parameters": (list,), "modules_to_save": (list,)}
    for name, kinds in types.items():
        value = config.get(name)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            words = " or ".join(kind.__name__ for kind in kinds)
            raise UserError(f"{path}: {name}={value!r:.60}", f"it must be of type {words}", "copy the file again")
    numbers = [("r", config.get("r")), ("lora_alpha", config.get("lora_alpha"))]
    for name in ("rank_pattern", "alpha_pattern"):
        numbers += [(name, value) for value in (config.get(name) or {}).values()]
    for name, value in numbers:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value <= _LARGEST):
            rule = f"{value!r:.60} is no number from 0 to {_LARGEST:g}"
            raise UserError(f"{path}: {name}", rule, "copy the file again")
    for name in ("target_modules", "target_parameters", "modules_to_save"):
        if isinstance(value := config.get(name), list) and not all(isinstance(each, str) for each in value):
            raise UserError(f"{path}: {name}", "it must be a list of names", "copy the file again")
    return config


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[tuple[list[str], Callable[[str], Tensor]]]:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise UserError(f"{file}", f"it cannot be read ({error.strerror or error})") from None
    if size > _MOST_BYTES:
        raise UserError(f"{file}", f"it has {size:,} bytes, and no adapter has above {_MOST_BYTES:,}")
    if file.suffix == ".safetensors":
        with open_safetensors(file) as opened:
            yield list(opened.keys()), lambda key: _taken(file, key, opened.get_tensor)
        return
    tensors = unpickled(file)
    yield list(tensors), tensors.__getitem__


def _taken(file: Path, key: str, take: Callable[[str], Tensor]) -> Tensor:
    try:
        return take(key)
    except Exception as error:  # noqa: BLE001 - types that this torch lacks raise what they like
        raise UserError(f"{file}: {key}", f"it cannot be read ({reason(error)})") from None
