"""Whether a micro-batch of a mixture of experts can be recorded: whether nobody asks how many rows each expert has.

Owns: what is known of it before a run. Does not own: the products (`wings.experts.products`), recording (`run.graphs`).
"""

from __future__ import annotations

from meshlora.loading.blueprint import Blueprint
from meshlora.wings.experts.forms import unknown_experts
from meshlora.wings.experts.products import reads_sizes_on_device

_OF_16_BYTES = 8  # numbers of bfloat16


def why_host_asks(blueprint: Blueprint) -> str | None:
    """Why the host would ask for numbers of rows in a forward or backward on one process; None: it does not."""
    plan, adapter = blueprint.plan, blueprint.trained
    if (name := unknown_experts(blueprint.model, plan.experts)) is not None:
        return (
            f"the host reads how many rows each expert of {name} has, whose form is not that which most families share"
        )
    if not plan.experts:
        return None
    if not reads_sizes_on_device(blueprint.dtype):
        return (
            "the host reads how many rows each expert has: one call for all of them is there in bfloat16, on GPUs of "
            "compute capability 9 and 10"
        )
    ranks = {adapter.targets[name].r for name in plan.projections if name in adapter.targets}
    if any(r % _OF_16_BYTES for r in ranks):
        return f"the host reads how many rows each expert has, as r is no multiple of {_OF_16_BYTES}"
    for rule in plan.projections.values():
        if rule.num_zero:
            return "some experts compute nothing, and the host reads how many rows the others have"
        if rule.in_features % _OF_16_BYTES or rule.out_features % _OF_16_BYTES:
            return (
                f"the host reads how many rows each expert has, as a width of theirs is no multiple of {_OF_16_BYTES}"
            )
    return None
