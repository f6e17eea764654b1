"""An objective: one value with all of its parameters, which is handed whole to the trainer and to the judge.

Owns: parameters and their rules; and of each objective which records it trains on, whether it needs the frozen base,
and what its loss is a mean over. Does not own: formulas. The trainer has one (`train.objectives`), and the judge its
own (`oracle.objectives`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from meshlora.common.errors import UserError

# What a loss is a mean over; pairs and records have rows of their own, which nothing else shares.
Per = Literal["token", "pair", "record"]
COUNTED: dict[Per, str] = {"token": "trained_tokens", "pair": "pairs", "record": "records"}  # as a result names them
_LARGEST = 1e6  # far above any use


@dataclass(frozen=True, kw_only=True)
class _Objective:
    """reader: of its records (`data.READERS`). per: what the loss is a mean over. is_of_text: it is one of plain text.

    trained_row: of the two rows of an example the one that is trained on; the loss then has a reference point, the
    divergence from the base over the other rows of all examples of the step. None: all rows are trained on.
    always_needs_base: whatever its parameters.
    """

    kind: str
    reader: ClassVar[str] = "text"
    per: ClassVar[Per] = "token"
    is_of_text: ClassVar[bool] = False
    trained_row: ClassVar[int | None] = None
    always_needs_base: ClassVar[bool] = False

    @property
    def needs_base(self) -> bool:
        """Whether the loss compares with what the frozen base says: the model with its adapter off."""
        return self.always_needs_base

    def _must(self, is_so: bool, name: str, rule: str) -> None:
        if not is_so:
            raise UserError(f"train.objective.{name}={getattr(self, name)}", f"it must be {rule}")

    def _above_0(self, *names: str) -> None:
        for name in names:
            self._must(0 < getattr(self, name) <= _LARGEST, name, f"above 0, at most {_LARGEST:,.0f}")


@dataclass(frozen=True, kw_only=True)
class Sft(_Objective):
    """Cross-entropy of text. label_smoothing: the share of it that goes to all tokens of the vocabulary alike."""

    kind: Literal["sft"] = "sft"
    label_smoothing: float = 0.0
    is_of_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._must(0 <= self.label_smoothing < 1, "label_smoothing", "in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class Policy(_Objective):
    """Clipped policy gradient from rollouts.

    clip_low, clip_high: how far below and above 1 the ratio to the old policy counts. kl_coef: how much the divergence
    from the frozen base weighs.
    """

    kind: Literal["policy"] = "policy"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    reader: ClassVar[str] = "rollouts"

    @property
    def needs_base(self) -> bool:
        """Only to be held to it."""
        return self.kl_coef > 0

    def __post_init__(self) -> None:
        self._must(0 < self.clip_low <= 1, "clip_low", "above 0, at most 1")
        self._above_0("clip_high")
        self._must(0 <= self.kl_coef <= _LARGEST, "kl_coef", f"not negative, at most {_LARGEST:,.0f}")


@dataclass(frozen=True, kw_only=True)
class Dpo(_Objective):
    """Direct preference optimisation over pairs. beta: how closely the policy is held to the base.

    label_smoothing: the share of pairs that are labelled the wrong way round.
    """

    kind: Literal["dpo"] = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    reader: ClassVar[str] = "pairs"
    per: ClassVar[Per] = "pair"
    always_needs_base: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._above_0("beta")
        rule = "in [0, 0.5): from there on the other answer would be the better"
        self._must(0 <= self.label_smoothing < 0.5, "label_smoothing", rule)


@dataclass(frozen=True, kw_only=True)
class Orpo(_Objective):
    """Odds-ratio preference optimisation over pairs, without the base.

    beta: how much the odds ratio weighs beside the cross-entropy of the chosen answer (lambda in the paper).
    """

    kind: Literal["orpo"] = "orpo"
    beta: float = 0.1
    reader: ClassVar[str] = "pairs"
    per: ClassVar[Per] = "pair"

    def __post_init__(self) -> None:
        self._above_0("beta")


@dataclass(frozen=True, kw_only=True)
class Kto(_Objective):
    """Kahneman-Tversky optimisation of single answers that were liked or not.

    beta: how closely the policy is held to the base. desirable_weight, undesirable_weight: of the loss of either kind.
    """

    kind: Literal["kto"] = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reader: ClassVar[str] = "feedback"
    per: ClassVar[Per] = "record"
    trained_row: ClassVar[int | None] = 0
    always_needs_base: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._above_0("beta", "desirable_weight", "undesirable_weight")


Objective = Sft | Policy | Dpo | Orpo | Kto
KINDS: dict[str, type[Objective]] = {kind.kind: kind for kind in get_args(Objective)}
