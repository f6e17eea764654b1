"""The registry of deliberate faults, collected from one file per theme.

If a fault survives `meshlora verify --mutation all` on a topology where it should show, the proof is weaker than it
claims. Does not own: small changes generated from syntax trees (`verify.faults.generated`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from contextlib import AbstractContextManager

from meshlora.verify.faults.fault import Mutation
from meshlora.verify.faults.generated import generated
from meshlora_ground.errors import UserError, did_you_mean


def applied(name: str | None) -> AbstractContextManager[None]:
    """A context with the mutation `name` injected, or with none. Raises: UserError: there is no such mutation."""
    return find(name).apply() if name is not None else contextlib.nullcontext()


def find(name: str) -> Mutation:
    """The mutation of that name, registered or generated. Raises: UserError: there is none."""
    if ":" in name:
        return generated(name)
    if name not in MUTATIONS:
        raise UserError(f"--mutation {name}", "there is no such mutation", did_you_mean(name, ["all", *MUTATIONS]))
    return MUTATIONS[name]


_THEMES = (
    *("borders", "context", "shards", "stages", "vocabulary", "gradients", "batches", "images", "adapters", "files"),
    *("optimizer", "dropout", "experts", "objectives", "policies", "preferences", "distillation", "runs", "kernels"),
    *("recompute", "float8", "ints", "streams", "encoders"),
)
MUTATIONS = dict[str, Mutation]()
for _theme in _THEMES:
    for _name, _fault in vars(importlib.import_module(f"meshlora.verify.faults.of_{_theme}")).items():
        if isinstance(_fault, Mutation):
            MUTATIONS[_name] = dataclasses.replace(_fault, name=_name)
