"""Diagnosis: the first difference from the reference, its ranks and ratio, and the likely cause in words.

Does not own: the rules from symptom to cause (`meshlora_judge.diagnosis.causes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from meshlora_judge.diagnosis.causes import CAUSES, from_step
from meshlora_judge.diagnosis.symptoms import Failure, follows_from_gradients, rank_errors
from meshlora_judge.judge import Evidence
from meshlora_judge.results import Phase, TensorResult

Failing = list[tuple[Phase, TensorResult]]  # those that fail, in execution order

_ROUNDED_TO = 1e-6
_LOW_PRECISION = "right to the digits of float32: something is computed, or kept, in a lower precision than float64"


@dataclass(frozen=True)
class Divergence:
    """The first place where ours differs from the reference.

    Attributes:
        phase, name: the tensor, first in execution order. relative: its error; infinite if it cannot be compared.
        ranks: ranks with a wrong part. ratio: ours / reference, if it is a small integer or the inverse of one.
        cause: the likely cause, in words. num_failed: number of failing tensors of the phase.
    """

    phase: str
    name: str
    relative: float
    ranks: list[int]
    ratio: float | None
    cause: str
    num_failed: int


def until_found(phases: Iterable[Phase]) -> Iterator[Phase]:
    """`phases` up to that of the first divergence: later ones do not change it."""
    failing: set[str] = set()
    for phase in phases:
        yield phase
        failed = [result for result in phase.results if not result.passed]
        failing |= {result.name for result in failed}
        if not all(_is_later_step(result, failing) for result in failed):
            return


def first_divergence(phases: list[Phase], evidence: Evidence) -> Divergence | None:
    """The first failing tensor in the execution order of a step; None if nothing fails."""
    failing = Failing()
    for phase in phases:
        for result in phase.results:
            if not result.passed:
                failing.append((phase, result))
    if not failing:
        return None
    phase, result = _first(failing)
    later = _later(failing)
    # A later step goes wrong by itself where the first one and the optimizer are right.
    is_right_at_first = phase.name == "deltas" or _is_later_step(result, _names(failing))
    comes_later = bool(later) and is_right_at_first and follows_from_gradients(evidence)
    if comes_later:
        phase, result = min(later, key=lambda one: _step_of(one[1]))
    case = Failure(phase, result, evidence)
    cause = _cause(case, comes_later=comes_later)
    ranks = []
    if phase.name != "saved_file":  # a file belongs to no rank
        for rank, error in rank_errors(result).items():
            if error > max(result.limit, 1e-12):
                ranks.append(rank)
    return Divergence(phase.name, result.name, result.error, sorted(ranks), case.ratio, cause, len(case.failed))


def _cause(case: Failure, *, comes_later: bool) -> str:
    if _is_rounding(case):
        return _LOW_PRECISION
    if comes_later:
        return from_step(case, _step_of(case.result))
    rule = CAUSES[case.phase.name]
    return rule if isinstance(rule, str) else rule(case)


def _names(failing: Failing) -> set[str]:
    return {result.name for _, result in failing}


def _first(failing: Failing) -> tuple[Phase, TensorResult]:
    """The first failure of the first step, or of any step if there is none.

    Later steps depend on the first one, which shows a fault better; except gradients of a step whose loss is right.
    """
    names = _names(failing)
    for phase, result in failing:
        if not _is_later_step(result, names):
            return phase, result
    return failing[0]


def _later(failing: Failing) -> Failing:
    """The failures of what later steps compute themselves: what the optimizer has not caused."""
    later = Failing()
    for phase, result in failing:
        if _step_of(result) > 1 and result.name.startswith(("loss of", "norm of", "clipped")):
            later.append((phase, result))
    return later


def _is_rounding(case: Failure) -> bool:
    """Whether all tensors of a float64 run are right to float32 precision."""
    return (
        case.phase.name in ("forward", "logits", "backward", "gradients")
        and case.evidence.case.dtype == "float64"
        and all(result.error < _ROUNDED_TO for result in case.phase.results)
    )


def _is_later_step(result: TensorResult, failing: Set[str]) -> bool:
    """Whether a result depends on those of an earlier step, judging by the names of the failures."""
    if result.name.startswith("loss of evaluation"):  # it comes after a later step
        return True
    step = _step_of(result)
    if result.name.startswith("clipped "):
        return f"loss of step {step}" in failing
    return step > 1


def _step_of(result: TensorResult) -> int:
    """The optimizer step that the name of a result says; 1 if it says none."""
    number = result.name.rpartition(" step ")[2]
    return int(number) if number.isdecimal() else 1
