"""PEFT's file format, in and out: `adapter_config.json` and `adapter_model.safetensors` with full tensors.

Owns: key names, writing (atomically, by rank 0), reading with every check. Files do not know the topology.
Does not own: what is trained (`adapter.targets`), merging into the base.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from meshlora.adapter.manage import attach, gather_adapter, runtime
from meshlora.adapter.targets import Target, resolve_targets
from meshlora.errors import MeshloraError, UnsupportedError, UserError, did_you_mean
from meshlora.parallel.collectives import broadcast_in_place
from meshlora.parallel.groups import Mesh
from meshlora.plan.rules import ModelPlan
from meshlora.state.files import new_folder, open_safetensors, read_json, write_json_atomically

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def file_key(module: str, side: str) -> str:
    """`model.layers.0.mlp.up_proj`, "A" -> `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`."""
    return f"{_PREFIX}{module}.lora_{side}.weight"


def save_adapter(model: Any, path: str | Path, *, adapter: str | None = None) -> None:
    """Write `adapter` (the active one by default) as a PEFT adapter folder. Collective: all ranks must call it.

    The folder appears whole or not at all; it is there on every rank's return.

    Raises:
        UserError: no such adapter. MeshloraError: the folder could not be written (on all ranks).
    """
    state = runtime(model)
    name = adapter or state.active
    if name is None or name not in state.adapters:
        raise UserError(f"adapter {name!r}", "the model has no such adapter", did_you_mean(name or "", state.adapters))
    # On every rank, so that what cannot be stored ends all of them.
    config = json.loads(json.dumps(_config_to_store(state.adapters[name].config, state.source)))
    tensors = {f"{_PREFIX}{factor}.weight": t for factor, t in gather_adapter(model, name).items()}
    if broken := [key for key, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise MeshloraError(f"{path}: not saved, {broken[0]} holds values that are not finite")
    failure: OSError | SafetensorError | None = None
    if state.mesh.rank == 0:
        try:
            write_adapter(Path(path), tensors, config)
        except (OSError, SafetensorError) as error:  # a full disk must end every rank, not leave them waiting
            failure = error
    if not _agree(failure is None, state.mesh):
        raise MeshloraError(f"{path}: the adapter could not be written ({failure or 'see rank 0'})") from failure


def write_adapter(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write full tensors and a configuration as an adapter folder, atomically. Same input, same bytes."""
    with new_folder(path) as folder:
        write_json_atomically(folder / CONFIG_FILE, dict(config))
        ordered = {key: tensors[key].contiguous() for key in sorted(tensors)}
        save_file(ordered, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / WEIGHTS_FILE).chmod(0o644)


def load_adapter(model: Any, path: str | Path, *, adapter: str = "default", ignore_dropout: bool = False) -> None:
    """Attach the PEFT adapter in folder `path` as `adapter`, frozen until `set_adapter`, on any topology.

    ignore_dropout: take an adapter that was trained with lora_dropout as one without.

    Raises:
        UserError: files missing or damaged, names, shapes or types that do not fit the model, values not finite.
    """
    state = runtime(model)
    folder = Path(path)
    config = read_config(folder, ignore_dropout=ignore_dropout)
    targets = resolve_targets(model, state.plan, config, strict=False)
    attach(model, adapter, config, targets, _read_factors(folder / WEIGHTS_FILE, targets, state.plan))


def read_config(folder: Path, *, ignore_dropout: bool = False) -> LoraConfig:
    """The `LoraConfig` stored in an adapter folder, lora_dropout set to 0 where it is to be ignored.

    Raises:
        UserError: missing, not JSON, or not a LoRA adapter. UnsupportedError: an option that this peft does not know.
    """
    if not folder.is_dir():
        raise UserError(f"adapter {folder}", "there is no such folder")
    if not (folder / WEIGHTS_FILE).is_file() and (folder / "adapter_model.bin").is_file():
        raise UserError(
            f"adapter {folder}", "it is pickled, and meshlora unpickles nothing", "save it again with a current peft"
        )
    stored = read_json(folder / CONFIG_FILE)
    if not isinstance(stored, dict) or stored.get("peft_type") != "LORA":
        kind = stored.get("peft_type") if isinstance(stored, dict) else None
        raise UserError(f"{folder / CONFIG_FILE}", f"peft_type is {kind!r}", "only LORA adapters can be loaded")
    if ignore_dropout:
        stored["lora_dropout"] = 0.0
    return lora_config(stored, f"{folder / CONFIG_FILE}")


def lora_config(values: Mapping[str, Any], where: str, *, unknown_is_error: bool = False) -> LoraConfig:
    """A `LoraConfig` from plain values.

    unknown_is_error: also for a name that is not set, as in a file that a person wrote. Files of other peft versions
    hold names that this one does not know; as long as they are off they change nothing.

    Raises:
        UserError: a value that peft refuses. UnsupportedError: a name that peft does not know and that is set.
    """
    known = {f.name for f in dataclasses.fields(LoraConfig)}
    unknown = [key for key, value in values.items() if key not in known and (value or unknown_is_error)]
    if unknown:
        raise UnsupportedError(
            f"{where}: {unknown[0]}", "it is not an option of this peft", did_you_mean(str(unknown[0]), known)
        )
    try:
        return LoraConfig(**{k: v for k, v in values.items() if k in known})
    except (TypeError, ValueError) as error:
        raise UserError(where, f"peft refuses it ({error})") from error


def check_adapter(folder: Path, targets: Mapping[str, Target], plan: ModelPlan) -> None:
    """Every check of `load_adapter`, without a mesh."""
    _read_factors(folder / WEIGHTS_FILE, targets, plan)


def _read_factors(file: Path, targets: Mapping[str, Target], plan: ModelPlan) -> dict[str, dict[str, Tensor]]:
    """Full factors by module and side, every one checked."""
    expected = _expected_shapes(targets, plan)
    full: dict[str, dict[str, Tensor]] = {name: {} for name in targets}
    with open_safetensors(file) as opened:
        keys = set(opened.keys())
        _check_keys(file, keys, expected.keys())
        for key, (module, side, shape) in expected.items():
            view = opened.get_slice(key)
            if tuple(view.get_shape()) != shape:
                raise UserError(
                    f"{file}: {key}",
                    f"its shape is {list(view.get_shape())}, this model and adapter_config.json need {list(shape)}",
                    "it belongs to another model or another rank",
                )
            if view.get_dtype() not in _FLOATS:
                raise UserError(
                    f"{file}: {key}", f"its type is {view.get_dtype()}", f"it must be one of {set(_FLOATS)}"
                )
            tensor = opened.get_tensor(key).clone()
            if not torch.isfinite(tensor).all():
                raise UserError(f"{file}: {key}", "it holds values that are not finite", "use an earlier checkpoint")
            full[module][side] = tensor
    return full


def _expected_shapes(targets: Mapping[str, Target], plan: ModelPlan) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    expected: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    for target in targets.values():
        rule = plan.linears[target.name]
        expected[file_key(target.name, "A")] = (target.name, "A", (target.r, rule.in_features))
        expected[file_key(target.name, "B")] = (target.name, "B", (rule.out_features, target.r))
    return expected


def _check_keys(file: Path, given: set[str], expected: Iterable[str]) -> None:
    wanted = set(expected)
    if missing := sorted(wanted - given):
        raise UserError(
            f"{file}",
            f"it lacks {len(missing)} of {len(wanted)} tensors, first {missing[0]}",
            did_you_mean(missing[0], given) if 0 < len(given) <= 10_000 else "",
        )
    if extra := sorted(given - wanted):
        raise UserError(
            f"{file}",
            f"{len(extra)} of its tensors have no place in this model, first {extra[0]}",
            "it belongs to another model, or its adapter_config.json does",
        )


def _config_to_store(config: LoraConfig, source: str | None) -> dict[str, Any]:
    """Plain, sorted values: the same configuration gives the same bytes in every process."""
    values = config.to_dict()
    values["base_model_name_or_path"] = str(values.get("base_model_name_or_path") or source or "") or None
    values["inference_mode"] = True
    values["task_type"] = "CAUSAL_LM"
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return getattr(value, "value", value)  # enums


def _agree(ok: bool, mesh: Mesh) -> bool:
    """What rank 0 says, on every rank."""
    flag = torch.tensor([int(ok)], device=mesh.device)
    return bool(broadcast_in_place(flag, mesh.world).item())
