"""The adapter files of our side, raw and as PEFT reads them.

Owns: reading them. Does not own: the expected contents (`meshlora_judge.judge`), or writing them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from meshlora_ground.compat.peft_names import names_as_loaded
from meshlora_ground.errors import reason
from meshlora_ground.model_class import reads_pairs
from meshlora_ground.tasks import PAIRED
from meshlora_judge.case import Case
from meshlora_judge.experts import PREFIX, Stack, in_experts, names_in_file, plain_name
from meshlora_judge.inputs import without_values
from meshlora_judge.pieces import in_pieces
from meshlora_judge.reference import scalings
from meshlora_judge.reference_case import read_back
from meshlora_judge.values import read_values, write_values

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# In a run's folder: the trainer's first and last checkpoint of the adapter, and a fresh, untrained adapter.
FIRST, LAST, FRESH = "run/initial", "run/adapter", "fresh"
_FOUND = "saved.safetensors"
# Fields that tell PEFT how to run an adapter; the start adapter was written for training.
_OF_USE = {"inference_mode": True}
# With experts these may be spelled differently, as PEFT rewrites some target names: their effect is compared instead,
# the rank and scale of each module.
_BY_EFFECT = ("target_modules", "target_parameters", "rank_pattern", "alpha_pattern")


@dataclass
class Saved:
    """The files of a run.

    Attributes:
        first, last, fresh: the tensors in the files, by factor name.
        read, logits, scalings: the last as read by PEFT, in float64, and PEFT's scale of each module.
        fresh_scalings: PEFT's scales of the fresh adapter.
        note: why PEFT cannot read the last. config_note, fresh_note: faults of the configurations.
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

    @classmethod
    def load(cls, folder: Path) -> Saved:
        """Read the results of `read_saved` from a run's folder."""
        return cls(**read_values(folder / _FOUND))


def read_saved(case: Case, folder: str, stacks: Mapping[str, Stack]) -> None:
    """Read the adapter files of a run, raw and with PEFT, and write the results next to them for `Saved.load`."""
    root, found = Path(folder), Saved()
    config = AutoConfig.from_pretrained(case.model, local_files_only=True, trust_remote_code=case.trust_remote_code)
    case.objective.configure(config)
    task = PAIRED if reads_pairs(config) else case.objective.task
    try:
        found.read, found.logits, found.scalings = read_back(case, root / LAST)
        found.config_note = _difference(root / LAST / CONFIG, Path(case.adapter) / CONFIG, task)
    except Exception as error:  # noqa: BLE001 - any error of PEFT on our file is a finding
        found.note = f"PEFT cannot read it: {reason(error)}"
    model: Any = None
    try:
        drawn = LoraConfig.from_pretrained(str(root / FRESH))
        model = without_values(case.model, drawn, case.objective, trust_remote_code=case.trust_remote_code)
        found.fresh_scalings = scalings(model)
    except Exception as error:  # noqa: BLE001 - the same
        found.fresh_note = f"PEFT cannot read it: {reason(error)}"

    def factors(place: str) -> dict[str, Tensor]:
        stored = in_experts(_tensors(root / place / WEIGHTS, stacks, model), stacks, in_file=True)
        return in_pieces(config, stored, case.pieces)

    found.first, found.last, found.fresh = factors(FIRST), factors(LAST), factors(FRESH)
    write_values(vars(found), root / _FOUND)


def _tensors(file: Path, stacks: Mapping[str, Stack], model: Any) -> dict[str, Tensor]:
    """model: that PEFT makes of a fresh adapter; None: it makes none."""
    try:
        stored = load_file(file)
    except (OSError, SafetensorError):
        return {}  # every name is then reported missing
    loaded: Mapping[str, str] = {}
    if model is not None:
        loaded = names_as_loaded(model.get_base_model(), stored)
    tensors = {loaded.get(key, key).removeprefix(PREFIX): tensor for key, tensor in stored.items()}
    if '"ensure_weight_tying": true' in file.with_name(CONFIG).read_text(encoding="utf-8"):
        for name in [name for name in tensors if name.endswith("lm_head.weight")]:
            # PEFT stores the one copy under both names.
            if any(n.endswith("embed_tokens.weight") and torch.equal(tensors[name], t) for n, t in tensors.items()):
                del tensors[name]
    of_experts = names_in_file(tensors, stacks)
    return {of_experts.get(name, plain_name(name)): tensor for name, tensor in tensors.items()}


def _difference(ours: Path, theirs: Path, task: str) -> str:
    """The first field in which a stored configuration differs from the start adapter's."""
    a, b = json.loads(ours.read_text(encoding="utf-8")), json.loads(theirs.read_text(encoding="utf-8"))
    if os.path.isdir(base := b.get("base_model_name_or_path") or ""):
        b["base_model_name_or_path"] = os.path.abspath(base)  # ours is loaded from any folder
    for name, value in sorted((b | _OF_USE | {"task_type": task}).items()):
        # Linears that PEFT would take for experts are parameters in ours, of the same keys (deepseek_v3, sarvam_mla).
        if name in _BY_EFFECT and (a.get("target_parameters") or b.get("target_parameters")):
            continue
        if _unordered(a.get(name)) != _unordered(value):
            return f"{name} is {a.get(name)!r}, not {value!r}"
    if unknown := a.keys() - b.keys():
        return f"{min(unknown)} is not a field of this peft"
    return ""


def _unordered(value: Any) -> Any:
    if isinstance(value, list) and {*map(type, value)} == {str}:
        return sorted(value)
    return value
