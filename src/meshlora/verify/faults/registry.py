"""The deliberate faults, each with the invariant that it breaks: one file for each theme, put together here.

Owns: finding one by its name. One that survives `meshlora verify --mutation all` on a topology where it can show means
that the proof proves less than it says. Does not own: how a fault is put in (`verify.faults.fault`), small changes that
are made from syntax trees (`verify.faults.generated`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from contextlib import AbstractContextManager

from meshlora.common.errors import UserError, did_you_mean
from meshlora.verify.faults.adapters import OF_ADAPTERS
from meshlora.verify.faults.batches import OF_BATCHES
from meshlora.verify.faults.borders import OF_BORDERS
from meshlora.verify.faults.dropout import OF_DROPOUT
from meshlora.verify.faults.experts import OF_EXPERTS
from meshlora.verify.faults.fault import Mutation
from meshlora.verify.faults.files import OF_FILES
from meshlora.verify.faults.generated import generated
from meshlora.verify.faults.gradients import OF_GRADIENTS
from meshlora.verify.faults.objectives import OF_OBJECTIVES
from meshlora.verify.faults.optimizer import OF_OPTIMIZER
from meshlora.verify.faults.packing import OF_PACKING
from meshlora.verify.faults.quantization import OF_QUANTIZATION
from meshlora.verify.faults.resuming import OF_RESUMING
from meshlora.verify.faults.several import OF_SEVERAL
from meshlora.verify.faults.sharding import OF_SHARDING
from meshlora.verify.faults.shards import OF_SHARDS
from meshlora.verify.faults.vocabulary import OF_VOCABULARY


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


_THEMES = [
    OF_BORDERS,
    OF_SHARDS,
    OF_VOCABULARY,
    OF_GRADIENTS,
    OF_BATCHES,
    OF_ADAPTERS,
    OF_FILES,
    OF_OPTIMIZER,
    OF_DROPOUT,
    OF_EXPERTS,
    OF_OBJECTIVES,
    OF_PACKING,
    OF_QUANTIZATION,
    OF_SHARDING,
    OF_RESUMING,
    OF_SEVERAL,
]

MUTATIONS: dict[str, Mutation] = functools.reduce(operator.or_, _THEMES)
