"""What one process would have produced, and a verdict on any other: nothing of the engine is imported.

`record` is what trainers of others need; it is imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshlora_judge.recording.recorder import record as record

__all__ = ["record"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from meshlora_judge.recording.recorder import record

    return record
