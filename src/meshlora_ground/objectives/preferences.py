"""Objectives of preferences: pairs of answers, and single answers that were liked or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from meshlora_ground.numbers import number
from meshlora_ground.objective import Objective, Per
from meshlora_ground.objectives.referenced import Referenced


@dataclass(frozen=True, kw_only=True)
class Dpo(Referenced):
    """Direct preference optimisation over pairs. beta: how closely the policy is held to the reference.

    label_smoothing: the assumed fraction of pairs with swapped labels.
    """

    kind: Literal["dpo"] = "dpo"
    beta: float = number(0.1, "above 0, at most 1,000,000")
    label_smoothing: float = number(0.0, "in [0, 0.5): from there on the other answer would be the better")
    reader: ClassVar[str] = "pairs"
    unit: ClassVar[Per] = "pair"
    always_needs_base: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Orpo(Objective):
    """Odds-ratio preference optimisation over pairs, without a reference.

    beta: weight of the odds ratio relative to the cross-entropy of the chosen answer (lambda in the paper).
    """

    kind: Literal["orpo"] = "orpo"
    beta: float = number(0.1, "above 0, at most 1,000,000")
    reader: ClassVar[str] = "pairs"
    unit: ClassVar[Per] = "pair"


@dataclass(frozen=True, kw_only=True)
class Kto(Referenced):
    """Kahneman-Tversky optimisation over single answers labelled desirable or not.

    beta: how closely the policy is held to the reference. desirable_weight, undesirable_weight: loss weights of either
    kind.
    """

    kind: Literal["kto"] = "kto"
    beta: float = number(0.1, "above 0, at most 1,000,000")
    desirable_weight: float = number(1.0, "above 0, at most 1,000,000")
    undesirable_weight: float = number(1.0, "above 0, at most 1,000,000")
    reader: ClassVar[str] = "feedback"
    unit: ClassVar[Per] = "record"
    trained_row: ClassVar[int | None] = 0
    always_needs_base: ClassVar[bool] = True
