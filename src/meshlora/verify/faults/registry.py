"""The registry of deliberate faults, collected from one file per theme.

Owns: lookup by name. If a fault survives `meshlora verify --mutation all` on a topology where it should show, the proof
is weaker than it claims. Does not own: injecting a fault (`verify.faults.fault`), small changes generated from syntax
trees (`verify.faults.generated`).
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from meshlora.verify.faults import (
    adapters,
    batches,
    borders,
    context,
    dropout,
    experts,
    files,
    gradients,
    images,
    kernels,
    noise,
    objectives,
    optimizer,
    ring,
    runs,
    shards,
    stages,
    vocabulary,
)
from meshlora.verify.faults.fault import Mutation
from meshlora.verify.faults.generated import generated
from meshlora_ground.errors import UserError, did_you_mean


def applied(name: str | None) -> AbstractContextManager[None]:
    """A context with the mutation `name` injected, or with none.

    Raises:
        UserError: there is no such mutation.
    """
    return find(name).apply() if name is not None else contextlib.nullcontext()


def find(name: str) -> Mutation:
    """The mutation of that name, registered or generated.

    Raises:
        UserError: there is none.
    """
    if ":" in name:
        return generated(name)
    if name not in MUTATIONS:
        raise UserError(f"--mutation {name}", "there is no such mutation", did_you_mean(name, ["all", *MUTATIONS]))
    return MUTATIONS[name]


_THEMES = (
    borders,
    context,
    shards,
    stages,
    vocabulary,
    gradients,
    batches,
    images,
    adapters,
    files,
    optimizer,
    dropout,
    noise,
    experts,
    objectives,
    ring,
    runs,
    kernels,
)
MUTATIONS: dict[str, Mutation] = {
    fault.name: fault for theme in _THEMES for fault in vars(theme).values() if isinstance(fault, Mutation)
}
