"""A proof as a versioned document of plain values, for `--json`, the HTML report and the cache of proofs.

Owns: the schema, which `docs/verify.md` describes. Non-finite numbers become null: JSON has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshlora.plan.grads import general_rules
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
        "runs": [_run(outcome) | (_details(outcome) if details else {}) for outcome in outcomes],
    }
    if details:
        result["gradient_axes"] = [
            {
                "base": words,
                "factor": f"lora_{side}",
                "split_dim": rule.split_dim,
                "axes": sorted(rule.grad_axes),
                "mean_axes": sorted(rule.mean_axes),
            }
            for words, side, rule in general_rules(sp=False)
        ]
    return result


def is_proved(outcomes: Sequence[Outcome]) -> bool:
    """Whether every run without a fault matches the reference, and every fault is caught."""
    return bool(outcomes) and all(outcome.passed == (outcome.mutation is None) for outcome in outcomes)


def _run(outcome: Outcome) -> dict[str, Any]:
    found = outcome.divergence
    return {
        "topology": str(outcome.topology),
        "mutation": outcome.mutation,
        "invariant": find(outcome.mutation).invariant if outcome.mutation else None,
        "passed": outcome.passed,
        "seconds": round(outcome.seconds, 3),
        "error": outcome.error or None,
        "phases": {phase.name: _phase(phase) for phase in outcome.phases},
        "first_divergence": vars(found) | {"relative": _number(found.relative)} if found else None,
    }


def _details(outcome: Outcome) -> dict[str, Any]:
    losses = zip(("ours", "reference"), outcome.losses, strict=True)
    kinds = {key: key.split(" ") for key in sorted({*outcome.collectives, *outcome.budget})}
    return {
        "tensors": {phase.name: [_tensor(result) for result in phase.results] for phase in outcome.phases},
        "losses": {side: list(map(_number, values)) for side, values in losses},
        "collectives": [
            {
                "phase": phase,
                "kind": kind,
                "calls": outcome.collectives.get(key, 0),
                "budget": outcome.budget.get(key, 0),
            }
            for key, (phase, kind) in kinds.items()
        ],
        "splits": outcome.facts,
    }


def _tensor(r: TensorResult) -> dict[str, Any]:
    return {"name": r.name, "relative": _number(r.error), "limit": _number(r.limit), "passed": r.passed, "note": r.note}


def _phase(phase: Phase) -> dict[str, Any]:
    worst = phase.worst
    return {
        "passed": phase.passed,
        "worst_relative": _number(worst.error) if worst else 0.0,
        "worst_name": worst.name if worst else None,
        "limit": _number(worst.limit) if worst else None,
        "num_tensors": len(phase.results),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
