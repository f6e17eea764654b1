"""`scripts/NAME.py`, or an example, as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def load_script(name: str, folder: str = "scripts") -> Any:
    """`{folder}/{name}.py`, known by its name: dataclasses look for the module there."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script
