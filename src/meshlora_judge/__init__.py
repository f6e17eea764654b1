"""What one process would have produced, and a verdict on any other: nothing of the engine is imported.

`record` and its kin are what trainers of others need; each is imported on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshlora_judge.recording.asked import RecordCallback as RecordCallback
    from meshlora_judge.recording.asked import record_if_asked as record_if_asked
    from meshlora_judge.recording.names import megatron as megatron
    from meshlora_judge.recording.recorder import record as record

_FILES = {"RecordCallback": "asked", "megatron": "names", "record": "recorder", "record_if_asked": "asked"}
__all__ = ["RecordCallback", "megatron", "record", "record_if_asked"]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"meshlora_judge.recording.{_FILES[name]}"), name)
