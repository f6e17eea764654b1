"""unsloth's and TRL's scripts and notebooks, read as a syntax tree. Nothing of them is ever run."""

from __future__ import annotations

from pathlib import Path

from meshlora.run.config.foreign.fact import Trainer
from meshlora_extra.importing.draft import Recipe


def read_python(file: Path, text: str, trainer: Trainer | None) -> Recipe:
    raise NotImplementedError
