"""From files to batches: records, tokens, order, tensors.

Owns: everything up to the tensors of one micro-batch. Does not own: processes; all of it is a pure function of the
data, the options, and (in `share`) the dp rank. The names below are for scripts of users: each is imported on first
access, so that who needs a batch does not load what reads files.
"""

import importlib
from typing import Any

_HOME = {
    "IGNORED": "batch",
    "Batch": "batch",
    "collate": "batch",
    "shifted": "batch",
    "Sequence": "dataset",
    "TokenizedDataset": "dataset",
    "joined": "packing",
    "with_positions": "packing",
    "read_preferences": "preferences",
    "Record": "records",
    "read_rollouts": "rollouts",
    "GlobalBatches": "sampler",
    "share": "sampler",
    "read_records": "sources",
    "tokenize": "tokenization",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
