"""The deliberate faults, each with the invariant that it breaks: one file for each theme, put together here.

Owns: finding one by its name. One that survives `meshlora verify --mutation all` on a topology where it can show means
that the proof proves less than it says. Does not own: how a fault is put in (`verify.faults.fault`), small changes that
are made from syntax trees (`verify.faults.generated`).
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from meshlora.common.errors import UserError, did_you_mean
from meshlora.verify.faults import (
    adapters,
    batches,
    borders,
    dropout,
    experts,
    files,
    gradients,
    objectives,
    optimizer,
    runs,
    shards,
    vocabulary,
)
from meshlora.verify.faults.fault import Mutation
from meshlora.verify.faults.generated import generated


def applied(name: str | None) -> AbstractContextManager[None]:
    """The mutation `name`, or nothing.

    Raises:
        UserError: there is no such mutation.
    """
    return find(name).apply() if name is not None else contextlib.nullcontext()


def find(name: str) -> Mutation:
    """The mutation of that name, or the generated one.

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
    shards,
    vocabulary,
    gradients,
    batches,
    adapters,
    files,
    optimizer,
    dropout,
    experts,
    objectives,
    runs,
)
MUTATIONS: dict[str, Mutation] = {
    fault.name: fault for theme in _THEMES for fault in vars(theme).values() if isinstance(fault, Mutation)
}
