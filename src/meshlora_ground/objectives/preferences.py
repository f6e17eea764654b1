"""Objectives of preferences: pairs of answers, and single answers that were liked or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from meshlora_ground.errors import UserError
from meshlora_ground.numbers import number
from meshlora_ground.objective import Objective, Per, Score
from meshlora_ground.objectives.referenced import Referenced

PairLoss = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "exo_pair",
    "robust",
    "discopop",
    "sft",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "aot",
    "aot_unpaired",
]
_SORTED = ("aot", "aot_unpaired")
# Their names, as TRL's. An f-divergence leaves a term of the prompt, which cancels in differences of two answers alone.
OF_DIFFERENCES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
_SMOOTHED = ("sigmoid", "exo_pair", "robust", *_SORTED)


@dataclass(frozen=True, kw_only=True)
class Dpo(Referenced):
    """Direct preference optimisation over pairs. beta: how closely the policy is held to the reference.

    label_smoothing: the assumed fraction of pairs with swapped labels.
    loss: what is made of the two log-ratios of a pair; or several, summed. loss_weights: of each of several.
    f_divergence: that from the reference which the rewards are those of. f_alpha: of alpha_divergence.
    length_weight: of the tokens of the longer answer beyond the length of the shorter one.
    discopop_tau: temperature of the mixture in discopop.
    weighted: each pair by how likely the policy would itself have said both answers (WPO).
    """

    kind: Literal["dpo"] = "dpo"
    beta: float = number(0.1, "above 0, at most 1,000,000")
    label_smoothing: float = number(0.0, "in [0, 0.5): from there on the other answer would be the better")
    loss: PairLoss | list[PairLoss] = "sigmoid"
    loss_weights: list[float] = field(default_factory=list)
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    f_alpha: float = number(0.5, most=10**6)
    length_weight: float = number(1.0, "in [0, 1]")
    discopop_tau: float = number(0.05, "above 0, at most 1,000,000")
    weighted: bool = False
    reader: ClassVar[str] = "pairs"
    unit: ClassVar[Per] = "pair"
    always_needs_base: ClassVar[bool] = True

    @property
    def losses(self) -> dict[PairLoss, float]:
        """Loss -> its weight."""
        names = [self.loss] if isinstance(self.loss, str) else self.loss
        return dict(zip(names, self.loss_weights or [1.0] * len(names), strict=True))

    @property
    def token_score(self) -> Score:
        """Of WPO: by it log-probabilities are compared with those of a token that the policy draws."""
        return "log_sum_sq" if self.weighted else ""

    @property
    def is_of_step(self) -> bool:  # type: ignore[override] # pairs are put in order, over the whole step
        return any(name in _SORTED for name in self.losses)

    def __post_init__(self) -> None:
        super().__post_init__()
        names, where = [self.loss] if isinstance(self.loss, str) else self.loss, "train.objective"
        if not names or len({*names}) < len(names):
            raise UserError(f"{where}.loss={names}", "a loss has one weight", "name each loss once")
        if self.loss_weights and len(self.loss_weights) != len(names):
            given = f"{where}: {len(self.loss_weights)} loss_weights for {len(names)} losses"
            raise UserError(given, "each loss has a weight", "give one weight a loss, or leave them out")
        if names == ["sft"]:
            raise UserError(f"{where}.loss=sft", "it is of better answers alone", "give kind: sft, or a loss beside it")
        self._check_effects([*names], where)
        if self.f_divergence != "reverse_kl" and (alone := [name for name in names if name not in OF_DIFFERENCES]):
            rule = "its rewards hold in differences of two answers alone, as in " + ", ".join(OF_DIFFERENCES)
            raise UserError(f"{where}.f_divergence={self.f_divergence} with loss={alone[0]}", rule, "leave out one")
        if self.f_divergence == "alpha_divergence" and self.f_alpha == 1:
            raise UserError(f"{where}.f_alpha=1", "that is reverse_kl", "give f_divergence: reverse_kl")
        if self.weighted and self.is_of_step:
            rule = "in order, the answers compared are not of one pair, which a weight is of"
            raise UserError(f"{where}.weighted with loss={names}", rule, "leave out one")
        if "exo_pair" in names and not self.label_smoothing:
            rule = "exo_pair compares with labels that are smoothed"
            raise UserError(f"{where}.loss=exo_pair", rule, "give label_smoothing: 0.001, as its paper")

    def _check_effects(self, names: list[str], where: str) -> None:
        """Refuse options that no loss in `names` reads. Raises: UserError."""
        if self.label_smoothing and not {*names} & {*_SMOOTHED}:
            rule = f"it has an effect with loss {', '.join(_SMOOTHED)}"
            raise UserError(f"{where}.label_smoothing={self.label_smoothing}", rule, "leave it out")
        if self.discopop_tau != 0.05 and "discopop" not in names:
            raise UserError(f"{where}.discopop_tau={self.discopop_tau}", "it has no effect without loss: discopop")
        if self.f_alpha != 0.5 and self.f_divergence != "alpha_divergence":
            raise UserError(f"{where}.f_alpha={self.f_alpha}", "it has no effect without f_divergence=alpha_divergence")


@dataclass(frozen=True, kw_only=True)
class Simpo(Objective):
    """Simple preference optimisation over pairs, without a reference.

    beta: weight of the difference of the answers' mean log-probabilities. gamma: by how much it is to exceed 0.
    label_smoothing: the assumed fraction of pairs with swapped labels.
    """

    kind: Literal["simpo"] = "simpo"
    beta: float = number(2.0, "above 0, at most 1,000,000")
    gamma: float = number(1.0, "not negative, at most 1,000,000")
    label_smoothing: float = number(0.0, "in [0, 0.5): from there on the other answer would be the better")
    reader: ClassVar[str] = "pairs"
    unit: ClassVar[Per] = "pair"


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
    kind. loss: apo_zero_unpaired has no reference point.
    """

    kind: Literal["kto"] = "kto"
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    beta: float = number(0.1, "above 0, at most 1,000,000")
    desirable_weight: float = number(1.0, "above 0, at most 1,000,000")
    undesirable_weight: float = number(1.0, "above 0, at most 1,000,000")
    reader: ClassVar[str] = "feedback"
    unit: ClassVar[Per] = "record"
    trained_row: ClassVar[int | None] = 0
    always_needs_base: ClassVar[bool] = True

    @property
    def has_first_pass(self) -> bool:
        """For the reference point."""
        return self.loss == "kto"
