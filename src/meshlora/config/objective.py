"""Training objectives as values with all of their parameters, shared by the trainer and the judge.

Owns: parameters and their rules; for each objective the records it trains on, whether it needs the frozen base, and
what its loss is a mean over. Does not own: formulas. The trainer has its own (`train.objectives`), and so has the
judge (`oracle.objectives`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from meshlora.config.numbers import check_numbers, number

# The unit that a loss is a mean over; pairs and records do not share rows with others.
Per = Literal["token", "pair", "record"]
COUNTED: dict[Per, str] = {"token": "trained_tokens", "pair": "pairs", "record": "records"}  # keys in results


@dataclass(frozen=True, kw_only=True)
class _Objective:
    """reader: key of `data.READERS`. per: the unit the loss is a mean over. is_of_text: it trains on plain text.

    trained_row: the one row of an example's two that is trained on; the loss then has a reference point, the
    divergence from the base over the other rows of all examples of the step. None: all rows are trained on.
    always_needs_base: for any parameters.
    """

    kind: str
    reader: ClassVar[str] = "text"
    per: ClassVar[Per] = "token"
    is_of_text: ClassVar[bool] = False
    trained_row: ClassVar[int | None] = None
    always_needs_base: ClassVar[bool] = False

    @property
    def needs_base(self) -> bool:
        """Whether the loss uses outputs of the frozen base: the model with its adapter off."""
        return self.always_needs_base

    def __post_init__(self) -> None:
        check_numbers("train.objective", self)


@dataclass(frozen=True, kw_only=True)
class Sft(_Objective):
    """Cross-entropy of text. label_smoothing: the probability mass spread uniformly over the vocabulary."""

    kind: Literal["sft"] = "sft"
    label_smoothing: float = number(0.0, "in [0, 1)")
    is_of_text: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Policy(_Objective):
    """Clipped policy gradient from rollouts.

    clip_low, clip_high: the ratio to the old policy is clipped to [1 - clip_low, 1 + clip_high]. kl_coef: weight of
    the divergence from the frozen base.
    """

    kind: Literal["policy"] = "policy"
    clip_low: float = number(0.2, "above 0, at most 1")
    clip_high: float = number(0.2, "above 0, at most 1,000,000")
    kl_coef: float = number(0.0, "not negative, at most 1,000,000")
    reader: ClassVar[str] = "rollouts"

    @property
    def needs_base(self) -> bool:
        """Only for the KL penalty."""
        return self.kl_coef > 0


@dataclass(frozen=True, kw_only=True)
class Dpo(_Objective):
    """Direct preference optimisation over pairs. beta: how closely the policy is held to the base.

    label_smoothing: the assumed fraction of pairs with swapped labels.
    """

    kind: Literal["dpo"] = "dpo"
    beta: float = number(0.1, "above 0, at most 1,000,000")
    label_smoothing: float = number(0.0, "in [0, 0.5): from there on the other answer would be the better")
    reader: ClassVar[str] = "pairs"
    per: ClassVar[Per] = "pair"
    always_needs_base: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Orpo(_Objective):
    """Odds-ratio preference optimisation over pairs, without the base.

    beta: weight of the odds ratio relative to the cross-entropy of the chosen answer (lambda in the paper).
    """

    kind: Literal["orpo"] = "orpo"
    beta: float = number(0.1, "above 0, at most 1,000,000")
    reader: ClassVar[str] = "pairs"
    per: ClassVar[Per] = "pair"


@dataclass(frozen=True, kw_only=True)
class Kto(_Objective):
    """Kahneman-Tversky optimisation over single answers labelled desirable or not.

    beta: how closely the policy is held to the base. desirable_weight, undesirable_weight: loss weights of either kind.
    """

    kind: Literal["kto"] = "kto"
    beta: float = number(0.1, "above 0, at most 1,000,000")
    desirable_weight: float = number(1.0, "above 0, at most 1,000,000")
    undesirable_weight: float = number(1.0, "above 0, at most 1,000,000")
    reader: ClassVar[str] = "feedback"
    per: ClassVar[Per] = "record"
    trained_row: ClassVar[int | None] = 0
    always_needs_base: ClassVar[bool] = True


Objective = Sft | Policy | Dpo | Orpo | Kto
KINDS: dict[str, type[Objective]] = {kind.kind: kind for kind in get_args(Objective)}
