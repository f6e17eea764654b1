"""Versions of everything numbers depend on: meshlora's code, Python, and the libraries that compute.

Owns: when two are close enough for a proof, and hashes for cache keys, too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_SRC = Path(__file__).parents[1]
# The packages of this distribution.
OWN = ("meshlora", "meshlora_ground", "meshlora_judge", "meshlora_extra")
_IMPORTS = re.compile(r"^ *(?:from (meshlora[.\w]*) import (\([^)]*\)|.*)|import (meshlora[.\w]*))", re.MULTILINE)
# The libraries that compute. Another minor release may compute differently, another patch release should not.
COMPUTING = ("torch", "transformers", "peft")


def versions() -> dict[str, str]:
    """Name -> version, including safetensors, which reads the files of transformers and PEFT."""
    installed = {name: version_of(name) for name in ("meshlora", *COMPUTING, "safetensors")}
    return {**installed, "python": platform.python_version()}


@functools.cache  # three milliseconds each, and every checkpoint asks for all of them
def version_of(name: str) -> str:
    """The version of a distribution, "" if it is not installed.

        version_of("liger-kernel")

    A source tree on PYTHONPATH, or folders copied into an image, have no metadata: then what the module says of itself,
    "unknown" if it says nothing.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    module = name.replace("-", "_")
    if importlib.util.find_spec(module) is None:
        return ""
    return str(getattr(importlib.import_module(module), "__version__", "unknown"))


def other_minors(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """The computing libraries whose minor version differs between `there` and `here`."""
    return [name for name in COMPUTING if _minor(there[name]) != _minor(here[name])]


def _minor(version: str) -> list[str]:
    """`2.13.0+cpu` -> 2, 13."""
    return version.split(".")[:2]


def digest(parts: Iterable[str]) -> str:
    """The first 24 hexadecimal digits of a SHA-256 over `parts`."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(f"{len(part)}:{part}".encode())
    return whole.hexdigest()[:24]


def own_sources() -> Iterable[str]:
    """The text of meshlora's own source files: a proof of other code is no proof."""
    for file in own_files():
        yield file.read_text(encoding="utf-8")


def own_files() -> list[Path]:
    """Meshlora's own source files, by name."""
    return sorted(file for package in OWN for file in (_SRC / package).rglob("*.py"))


def name_of(file: Path) -> str:
    """A source file as pages and messages call it: below src, and below src/meshlora for those that are there."""
    return str(file.relative_to(_SRC)).removeprefix("meshlora/")


def file_of(name: str) -> Path:
    """The file of a name that `name_of` gave, which need not be there."""
    return _SRC / name if name.partition("/")[0] in OWN[1:] else _SRC / "meshlora" / name


@functools.cache
def sources_of(module: str) -> tuple[str, ...]:
    """The text of a module of meshlora, and of all that it imports, directly or through others.

    sources_of("meshlora_judge.reference_case")
    """
    found: dict[str, str] = {}
    wanted = [module]
    while wanted:
        name = wanted.pop()
        path = _SRC.joinpath(*name.split("."))
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if name in found or not file.is_file():  # a class or a function of a module
            continue
        found[name] = file.read_text(encoding="utf-8")
        for package, names, whole in _IMPORTS.findall(found[name]):
            wanted += [package or whole, *(f"{package}.{each}" for each in re.findall(r"\w+", names))]
    return tuple(found[name] for name in sorted(found))
