"""Who holds which experts: found by looking at the matrices themselves, as for rows and columns.

Owns: fingerprints of stacks of matrices matched to experts, and traces of ranks with the names of single experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from meshlora.oracle.trace import Trace
from meshlora.plan.topology import Topology

_FACTORS = ("initial", "gradients", "final", "fresh", "fresh_both")


def by_expert(trace: Trace, reference: Trace, topology: Topology, rank: int) -> Trace:
    """`trace` of a rank with what it holds of each expert under a name of its own."""
    held = {
        name: _experts_of(name, trace, reference, topology, rank) for name in trace.rows if trace.rows[name].ndim == 2
    }
    shared = {name for name, stack in reference.stacks.items() if stack.is_shared}
    factors: dict[str, Any] = {kind: _taken_apart(getattr(trace, kind), held, shared) for kind in _FACTORS}
    clipped = [_taken_apart(gradients, held, shared) for gradients in trace.clipped]
    return replace(with_prints_of_each(trace, held), clipped=clipped, **factors)


def with_prints_of_each(trace: Trace, held: Mapping[str, list[int]] | None = None) -> Trace:
    """Fingerprints of the rows and columns of each expert; `held`: which ones, of the reference all."""
    found: dict[str, Any] = {}
    for kind in ("rows", "columns"):
        prints: dict[str, Tensor] = {}
        for name, own in getattr(trace, kind).items():
            if own.ndim == 1:
                prints[name] = own
                continue
            experts = held[name] if held is not None else list(range(len(own)))
            prints |= {_name(name, expert): part for expert, part in zip(experts, own, strict=True)}
        found[kind] = prints
    return replace(trace, **found)


def _experts_of(name: str, trace: Trace, reference: Trace, topology: Topology, rank: int) -> list[int]:
    """Which experts a rank holds of the projection `name`: those with rows, or columns, of theirs."""
    number = len(trace.rows[name])
    votes = [Counter[int]() for _ in range(number)]
    for kind in ("rows", "columns"):
        owner: dict[int, int] = {}
        every = getattr(reference, kind).get(name)
        for expert, prints in enumerate([] if every is None or every.ndim != 2 else every.tolist()):
            for value in prints:
                owner[value] = -1 if owner.setdefault(value, expert) != expert else expert
        for vote, prints in zip(votes, getattr(trace, kind)[name].tolist(), strict=True):
            vote.update(found for value in prints if (found := owner.get(value, -1)) >= 0)
    first = topology.expert_coordinates(rank)["ep"] * number
    return [vote.most_common(1)[0][0] if vote else first + index for index, vote in enumerate(votes)]


def _taken_apart(factors: Mapping[str, Tensor], held: Mapping[str, list[int]], shared: set[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in factors.items():
        module, _, part = name.rpartition(".lora_")
        experts = held.get(module)
        if experts is None:
            found[name] = tensor
        elif len(tensor) != (1 if module in shared else len(experts)):
            found[f"{name} of {len(tensor)} experts"] = tensor  # that is none of the reference's
        elif module in shared:
            found[name] = tensor[0]
        else:
            for expert, matrix in zip(experts, tensor, strict=True):
                found[f"{_name(module, expert)}.lora_{part}"] = matrix
    return found


def _name(projection: str, expert: int) -> str:
    owner, _, leaf = projection.rpartition(".")
    return f"{owner}.{expert}.{leaf}"
