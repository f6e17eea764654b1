"""A proof as a versioned document of plain values, for `--json`, the HTML report and the cache of proofs.

Owns: the schema, which `docs/verify.md` describes. Non-finite numbers become null: JSON has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshlora.plan.table import general_rules
from meshlora.verify.faults.registry import find
from meshlora.verify.proof import Outcome
from meshlora.verify.request import Proof
from meshlora_ground.versions import versions
from meshlora_judge.results import Phase, TensorResult

SCHEMA_VERSION = 1
_OF_CASE = ("model_type", "dtype", "seed", "steps", "schedule", "device", "lora", "packing", "recompute", "resumes")


def document(
    proof: Proof, outcomes: Sequence[Outcome], *, command: str, seconds: float, details: bool = False
) -> dict[str, Any]:
    """The whole proof. details: also the error of every tensor, losses and collectives, for the report."""
    case = proof.case
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "model": case.model or "twin",
        "versions": versions(),
        **{name: getattr(case, name) for name in _OF_CASE},
        "objective": case.objective.kind,
        **{name: value for name, value in vars(case.objective).items() if name != "kind"},
        "adapters": proof.request.adapters,
        "ranks_per_gpu": proof.request.ranks_per_gpu,
        "passed": is_proved(outcomes),
        "seconds": round(seconds, 2),
        "runs": list(map(_run, outcomes)),
    }
    if details:
        for run, outcome in zip(result["runs"], outcomes, strict=True):
            run |= _details(outcome)
        result["gradient_axes"] = axes = []
        for words, side, rule in general_rules(sp=False):
            summed, averaged = sorted(rule.grad_axes), sorted(rule.mean_axes)
            own = {"base": words, "factor": f"lora_{side}", "split_dim": rule.split_dim}
            axes.append(own | {"axes": summed, "mean_axes": averaged})
    return result


def is_proved(outcomes: Sequence[Outcome]) -> bool:
    """Whether every run without a fault matches the reference, and every fault is caught."""
    return bool(outcomes) and all(outcome.passed == (outcome.mutation is None) for outcome in outcomes)


def _run(outcome: Outcome) -> dict[str, Any]:
    found, invariant, first = outcome.divergence, None, None
    if outcome.mutation:
        invariant = find(outcome.mutation).invariant
    if found:
        first = vars(found) | {"relative": _number(found.relative)}
    return {
        "topology": str(outcome.topology),
        "mutation": outcome.mutation,
        "invariant": invariant,
        "passed": outcome.passed,
        "seconds": round(outcome.seconds, 3),
        "error": outcome.error or None,
        "phases": {phase.name: _phase(phase) for phase in outcome.phases},
        "first_divergence": first,
    }


def _details(outcome: Outcome) -> dict[str, Any]:
    ours, reference = outcome.losses
    collectives = []
    for key in sorted(outcome.collectives.keys() | outcome.budget.keys()):
        phase, kind = key.split(" ")
        calls, budget = outcome.collectives.get(key, 0), outcome.budget.get(key, 0)
        collectives.append({"phase": phase, "kind": kind, "calls": calls, "budget": budget})
    return {
        "tensors": {phase.name: list(map(_tensor, phase.results)) for phase in outcome.phases},
        "losses": {"ours": list(map(_number, ours)), "reference": list(map(_number, reference))},
        "collectives": collectives,
        "splits": outcome.facts,
    }


def _tensor(r: TensorResult) -> dict[str, Any]:
    return {"name": r.name, "relative": _number(r.error), "limit": _number(r.limit), "passed": r.passed, "note": r.note}


def _phase(phase: Phase) -> dict[str, Any]:
    found: dict[str, Any] = {"passed": phase.passed, "worst_relative": 0.0, "worst_name": None, "limit": None}
    if worst := phase.worst:  # none of a phase without tensors
        found |= {"worst_relative": _number(worst.error), "worst_name": worst.name, "limit": _number(worst.limit)}
    return found | {"num_tensors": len(phase.results)}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # json.dumps would write NaN, which is no JSON
