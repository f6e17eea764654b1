"""A proof as a document: plain values with a version, for `--json`, the HTML report and the cache of proofs.

Owns: the schema, which `docs/verify.md` describes. Numbers that are not finite are null: JSON has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshlora.common.versions import versions
from meshlora.oracle.results import Phase
from meshlora.plan.grads import general_rules
from meshlora.verify.faults.registry import find
from meshlora.verify.proof import Outcome
from meshlora.verify.request import Proof

SCHEMA_VERSION = 1


def document(
    proof: Proof, outcomes: Sequence[Outcome], *, command: str, seconds: float, details: bool = False
) -> dict[str, Any]:
    """The whole proof. details: also every tensor's error, losses and collectives, as the report shows them."""
    case = proof.case
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "model_type": case.model_type,
        "model": case.model or "twin",
        "versions": versions(),
        "dtype": case.dtype,
        "seed": case.seed,
        "steps": case.steps,
        "device": proof.case.device,
        "lora": case.lora,
        "objective": case.objective.kind,
        **{name: value for name, value in vars(case.objective).items() if name != "kind"},
        **{key: getattr(case, key) for key in ("packing", "recompute", "resumes")},
        "adapters": proof.request.adapters,
        "passed": is_proved(outcomes),
        "seconds": round(seconds, 2),
        "runs": [_run(outcome, details=details) for outcome in outcomes],
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
    """Every run without a fault agrees with the reference, and every fault was caught."""
    return bool(outcomes) and all(outcome.passed == (outcome.mutation is None) for outcome in outcomes)


def _run(outcome: Outcome, *, details: bool) -> dict[str, Any]:
    found = outcome.divergence
    run: dict[str, Any] = {
        "topology": str(outcome.topology),
        "mutation": outcome.mutation,
        "invariant": find(outcome.mutation).invariant if outcome.mutation else None,
        "passed": outcome.passed,
        "seconds": round(outcome.seconds, 3),
        "error": outcome.error or None,
        "phases": {phase.name: _phase(phase) for phase in outcome.phases},
        "first_divergence": None
        if found is None
        else {
            "phase": found.phase,
            "name": found.name,
            "relative": _number(found.relative),
            "ranks": found.ranks,
            "ratio": found.ratio,
            "cause": found.cause,
            "num_failed": found.num_failed,
        },
    }
    if details:
        run["tensors"] = {
            phase.name: [
                {
                    "name": r.name,
                    "relative": _number(r.error),
                    "limit": _number(r.limit),
                    "passed": r.passed,
                    "note": r.note,
                }
                for r in phase.results
            ]
            for phase in outcome.phases
        }
        ours, reference = (list(map(_number, losses)) for losses in outcome.losses)
        run["losses"] = {"ours": ours, "reference": reference}
        run["collectives"] = [
            {
                "phase": phase,
                "kind": kind,
                "calls": outcome.collectives.get(key, 0),
                "budget": outcome.budget.get(key, 0),
            }
            for key in sorted({*outcome.collectives, *outcome.budget})
            for phase, kind in [key.split(" ")]
        ]
        run["splits"] = outcome.facts
    return run


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
