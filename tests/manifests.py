"""Manifests written by hand: with a right hash of themselves, whatever they say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from meshlora.run.checkpoint.manifest import FILE


def manifest_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / FILE).read_text()))


def sign(folder: Path, **changes: Any) -> None:
    """Make the manifest of `folder` that of its files as they are, with `changes` to what it says."""
    content = manifest_of(folder)
    for name, entry in content["files"].items():
        if (folder / name).is_file():
            held = (folder / name).read_bytes()
            entry.update(bytes=len(held), sha256=hashlib.sha256(held).hexdigest())
    write(folder, content | changes)


def write(folder: Path, content: dict[str, Any]) -> None:
    """Store `content` with a right hash of itself."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    own = hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (folder / FILE).write_text(json.dumps({**rest, "sha256": own}))
