"""Folders as a run saves them, of files that only look like an adapter's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshlora.run.checkpoint.manifest import STATE_FILE, Kind, Manifest, write_manifest
from meshlora_ground.versions import versions

IDENTITY = {"train.lr": "0.001", "model": f"sha256:{'0' * 64}"}


def save(folder: Path, kind: Kind = "checkpoint", *, step: int = 4, steps: int = 6, **more: Any) -> Path:
    """A whole folder of this kind; `more` of its manifest."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(200)))
    if kind == "checkpoint":
        (folder / STATE_FILE).write_bytes(bytes(range(100)))
        more = {"topology": "dp=2"} | more
    values: dict[str, Any] = {"updates": step, "identity": IDENTITY, "versions": versions(), **more}
    write_manifest(folder, Manifest(kind=kind, step=step, steps=steps, **values))
    return folder


def save_steps(output: Path, *steps: int, **more: Any) -> list[Path]:
    """Checkpoints of these steps in the output of a run."""
    return [save(output / "checkpoints" / f"step-{step:06d}", step=step, **more) for step in steps]
