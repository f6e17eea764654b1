"""The registry of deliberate faults, collected from one file per theme.

If a fault survives `meshlora verify --mutation all` on a topology where it should show, the proof is weaker than it
claims. Does not own: small changes generated from syntax trees (`verify.faults.generated`).
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from meshlora.verify.faults import (
    of_adapters,
    of_batches,
    of_borders,
    of_context,
    of_distillation,
    of_dropout,
    of_encoders,
    of_experts,
    of_files,
    of_float8,
    of_gradients,
    of_images,
    of_ints,
    of_invoked,
    of_kernels,
    of_noise,
    of_objectives,
    of_optimizer,
    of_policies,
    of_preferences,
    of_recompute,
    of_rewards,
    of_ring,
    of_runs,
    of_shards,
    of_stages,
    of_starts,
    of_streams,
    of_vocabulary,
)
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


_THEMES = [of_borders, of_context, of_shards, of_stages, of_vocabulary, of_gradients, of_batches, of_images]
_THEMES += [of_adapters, of_files, of_optimizer, of_dropout, of_noise, of_experts, of_objectives, of_ring]
_THEMES += [of_policies, of_preferences, of_rewards, of_distillation]
_THEMES += [of_runs, of_kernels, of_recompute, of_float8, of_ints, of_invoked, of_starts, of_streams]
_THEMES += [of_encoders]
MUTATIONS = dict[str, Mutation]()
for _theme in _THEMES:
    for _fault in vars(_theme).values():
        if isinstance(_fault, Mutation):
            MUTATIONS[_fault.name] = _fault
