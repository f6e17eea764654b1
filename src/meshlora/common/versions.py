"""What numbers are computed with: meshlora's code, Python, and the libraries whose behaviour they depend on.

Owns: their names and versions, when two are alike enough for a proof, and keys of what depends on them.
Does not own: what is done where they differ.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

# Those that compute. A release of another minor number may compute otherwise, one of another patch should not.
COMPUTING = ("torch", "transformers", "peft")


def versions() -> dict[str, str]:
    """Name -> version; transformers' and PEFT's files are read by safetensors."""
    installed = {name: importlib.metadata.version(name) for name in ("meshlora", *COMPUTING, "safetensors")}
    return {**installed, "python": platform.python_version()}


def other_minors(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Which libraries that compute have another minor version `here` than `there`."""
    return [name for name in COMPUTING if _minor(there[name]) != _minor(here[name])]


def _minor(version: str) -> list[str]:
    """`2.13.0+cpu` -> 2, 13."""
    return version.split(".")[:2]


def digest(parts: Iterable[str]) -> str:
    """The first 24 hexadecimal digits of a hash over `parts`."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(f"{len(part)}:{part}".encode())
    return whole.hexdigest()[:24]


def own_sources() -> Iterable[str]:
    """meshlora's own code, file by file: a proof of other code is no proof."""
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        yield file.read_text(encoding="utf-8")
