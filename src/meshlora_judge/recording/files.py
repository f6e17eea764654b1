"""The files of a recording: one for each rank, of plain values and tensors. Nothing in them is code.

FOLDER/rank-00000.safetensors   FOLDER/rank-00001.safetensors ...
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from meshlora_ground.errors import UserError, numbered, reason
from meshlora_ground.files import write_atomically
from meshlora_judge.values import read_values, write_values

VERSION = 1


@dataclass
class Step:
    """One optimizer step on one rank. Tensors are whole where torch knows their placement, else the rank's own.

    Attributes:
        micro_batches: what each forward with gradients was given. losses: what each backward began with.
        left: gradients by name that the first forward found, none where they are cleared.
        raw, clipped: gradients by name, before clipping (without it: after the last backward) and as the optimizer
            took them.
        clip: max_norm, the norm that clipping returned, and how often it was called; empty if it was not called.
        optimizer: class, groups (options, names) and state before the step. before, after: trained parameters.
    """

    micro_batches: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    left: dict[str, Tensor] = field(default_factory=dict)
    raw: dict[str, Tensor] = field(default_factory=dict)
    clipped: dict[str, Tensor] = field(default_factory=dict)
    clip: dict[str, float] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Recording:
    """What one rank saw.

    Attributes:
        loss: its kind and numbers (`recording.losses`). base: the name or path that the model was read from.
        config: of the base. adapters: PEFT's configuration of each. active: those in use. wrapper: class around the
        model. trained, frozen: parameter -> how it lies; a frozen one has a fingerprint, of the rank's part.
        frozen_adapters: values of adapters that are not trained, as of DPO's reference.
        autocast: its dtype, or "". fsdp: FSDP has sharded it. notes: what the recorder changed.
    """

    rank: int
    world_size: int
    loss: dict[str, Any] = field(default_factory=dict)
    base: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, dict[str, Any]] = field(default_factory=dict)
    active: list[str] = field(default_factory=list)
    wrapper: str = ""
    trained: dict[str, dict[str, Any]] = field(default_factory=dict)
    frozen: dict[str, dict[str, Any]] = field(default_factory=dict)
    frozen_adapters: dict[str, Tensor] = field(default_factory=dict)
    autocast: str = ""
    fsdp: bool = False
    notes: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    version: int = VERSION

    def write(self, folder: Path) -> None:
        """Write or replace this rank's file, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        values = vars(self) | {"steps": list(map(vars, self.steps))}
        write_atomically(_file_of(folder, self.rank), lambda path: write_values(values, path))


def check_free(folder: Path, rank: int) -> None:
    """Refuse a folder with this rank's recording: files of two would be taken for one. Raises: UserError."""
    if _file_of(folder, rank).exists():
        raise UserError(f"{folder}", "it holds a recording", "give another folder, or remove it")


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


def read_recordings(folder: Path) -> list[Recording]:
    """The recordings of all ranks, in order. Raises: UserError: files are missing, damaged, or of unequal steps."""
    files = sorted(folder.glob("rank-*.safetensors")) if folder.is_dir() else []
    if not files:
        rule = "it holds no recording"
        raise UserError(f"{folder}", rule, "meshlora_judge.record writes one: docs/judge.md")
    found = list(map(_read, files))
    size = found[0].world_size
    missing = sorted(set(range(size)) - {each.rank for each in found})
    if missing or len(found) != size:
        raise UserError(f"{folder}", f"of {size} ranks it has not {numbered('rank', missing)}", "copy all of them here")
    steps = {len(each.steps) for each in found}
    if len(steps) > 1:
        raise UserError(f"{folder}", f"ranks recorded {min(steps)} to {max(steps)} steps", "record again")
    return sorted(found, key=lambda each: each.rank)


def _read(file: Path) -> Recording:
    try:
        values = read_values(file)
        if values.get("version") != VERSION:
            rule = f"it is of version {values.get('version')} of recordings, this judge reads {VERSION}"
            raise UserError(f"{file}", rule, "record again with this meshlora_judge")
        names = {each.name for each in dataclasses.fields(Step)}
        steps = [Step(**{name: step[name] for name in names}) for step in values.pop("steps")]
        known = {each.name for each in dataclasses.fields(Recording)}
        return Recording(**{name: value for name, value in values.items() if name in known}, steps=steps)
    except UserError:
        raise
    except Exception as error:  # whatever a stranger's file can make safetensors, json and dataclasses say
        raise UserError(f"{file}", f"it is damaged or no recording ({reason(error)})", "record again") from error
