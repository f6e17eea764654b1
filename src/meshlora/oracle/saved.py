"""What our side left on disk: the adapter files as they are, and what PEFT makes of them.

Owns: reading them. Does not own: what they should hold (`oracle.judge`), or how they are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from meshlora.common.errors import reason
from meshlora.oracle.case import Case
from meshlora.oracle.experts import Stack, in_experts, names_in_file
from meshlora.oracle.pieces import in_pieces
from meshlora.oracle.reference import scalings
from meshlora.oracle.reference_case import read_back

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Inside the folder of a run: what the trainer saves first and last, and an adapter that is drawn and not trained.
FIRST, LAST, FRESH = "run/initial", "run/adapter", "fresh"
_READ = "read.safetensors"
# What tells PEFT how to run an adapter; the one that both sides start from was written for training.
_OF_USE = {"inference_mode": True, "task_type": "CAUSAL_LM"}
# Of models with experts these may be said in other words, as PEFT takes some words for others: what it makes of them
# counts, where it puts which rank and scale.
_BY_EFFECT = ("target_modules", "target_parameters", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class Saved:
    """The files of a run.

    Attributes:
        first, last, fresh: what the files hold, under the names of factors.
        read, logits, scalings: the last as PEFT reads it, in float64, and the scale that PEFT gives to each module.
        fresh_scalings: those of the drawn one.
        note: why PEFT cannot read the last. config_note, fresh_note: what is wrong with their configurations.
    """

    first: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)
    fresh: dict[str, Tensor] = field(default_factory=dict)
    read: dict[str, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None
    scalings: dict[str, float] = field(default_factory=dict)
    fresh_scalings: dict[str, float] = field(default_factory=dict)
    note: str = ""
    config_note: str = ""
    fresh_note: str = ""


def read_with_peft(case: Case, folder: str) -> dict[str, Any]:
    """The part of `Saved` that PEFT has to say, as plain values; tensors go to a file beside."""
    root = Path(folder)
    found: dict[str, Any] = {}
    try:
        factors, logits, found["scalings"] = read_back(case, root / LAST)
        save_file({**factors, "logits": logits}, root / _READ)
        found["config_note"] = _difference(root / LAST / CONFIG, Path(case.adapter) / CONFIG)
    except Exception as error:  # noqa: BLE001 - whatever PEFT says of a file that we wrote is the finding
        found["note"] = f"PEFT cannot read it: {reason(error)}"
    try:
        found["fresh_scalings"] = _scalings_of(case, root / FRESH)
    except Exception as error:  # noqa: BLE001 - the same
        found["fresh_note"] = f"PEFT cannot read it: {reason(error)}"
    return found


def read_saved(case: Case, folder: Path, found: dict[str, Any], stacks: Mapping[str, Stack]) -> Saved:
    """Everything, from the files and from what `read_with_peft` found."""
    config = AutoConfig.from_pretrained(case.model, local_files_only=True, trust_remote_code=case.trust_remote_code)
    read = _tensors(folder / _READ) if not found.get("note") else {}
    first, last, fresh = (
        in_pieces(config, in_experts(_tensors(folder / name / WEIGHTS, stacks), stacks, in_file=True), case.pieces)
        for name in (FIRST, LAST, FRESH)
    )
    return Saved(first, last, fresh, read, read.pop("logits", None), **found)


def _tensors(file: Path, stacks: Mapping[str, Stack] | None = None) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as stored:
            keys = {key: key.removeprefix("base_model.model.") for key in stored.keys()}  # noqa: SIM118 - not a dict
            of_experts = names_in_file(keys.values(), stacks or {})
            return {of_experts.get(name, _plain(name)): stored.get_tensor(key) for key, name in keys.items()}
    except (OSError, SafetensorError):
        return {}  # every name is then missing


def _plain(key: str) -> str:
    """The name of a trained parameter in the model without PEFT, from a key without the prefix of PEFT's model."""
    name = key.replace(".base_layer.", ".")
    return name.removesuffix(".weight") if ".lora_" in name else name


def _difference(ours: Path, theirs: Path) -> str:
    """The first field in which a stored configuration is not the one that training started from."""
    a, b = (json.loads(file.read_text(encoding="utf-8")) for file in (ours, theirs))
    for name, value in sorted((b | _OF_USE).items()):
        if name in _BY_EFFECT and b.get("target_parameters"):
            continue
        if _unordered(a.get(name)) != _unordered(value):
            return f"{name} is {a.get(name)!r}, not {value!r}"
    return "".join(f"{name} is not a field of this peft" for name in sorted(a.keys() - b.keys())[:1])


def _unordered(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else value


def _scalings_of(case: Case, folder: Path) -> dict[str, float]:
    """Where PEFT puts an adapter of the configuration in `folder`, and its scales; no weight is read."""
    trust = case.trust_remote_code
    config = AutoConfig.from_pretrained(case.model, local_files_only=True, trust_remote_code=trust)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust)
        return scalings(get_peft_model(base, LoraConfig.from_pretrained(str(folder))))
