"""LoRA adapters on any mesh of processes: the adapter one process would have produced.

`import meshlora` imports nothing else: each name below is imported on first access, so that the command line responds
at once, to Ctrl-C too.
"""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# PEFT imports bitsandbytes wherever it is installed, which then reports a missing fast path in every process.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# Name -> the module that has it, as the stub beside this file says it to type checkers.
_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_HOME = {name: module for module, name in re.findall(r"from (\S+) import (\w+) as", _STUB)}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
