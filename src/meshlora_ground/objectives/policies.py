"""Objectives of rollouts: policy gradients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from meshlora_ground.errors import UserError
from meshlora_ground.numbers import number
from meshlora_ground.objective import Per, Score
from meshlora_ground.objectives.referenced import Referenced

# Option, or how its name begins -> the losses that read it.
_READ_BY = {"clip_": ("clipped", "cispo"), "delta": ("clipped",), "sapo_": ("sapo",), "vespo_": ("vespo",)}


@dataclass(frozen=True, kw_only=True)
class _PolicyGradient(Referenced):
    """Policy gradient from rollouts, weighted by the ratio of the policy to the one that acted.

    ratio: of each token, or of a whole sequence: the geometric mean over its tokens.
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    delta: a bound of the ratio that holds where clipping does not: with a negative advantage.
    loss: clipped: a ratio that has left the interval gains nothing more. cispo: the clipped ratio is a constant weight.
        sapo: a sigmoid of the ratio. vespo: a weight of the whole sequence.
    sapo_temperature_pos, sapo_temperature_neg: how soon it flattens, where the advantage is positive, and else.
    vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: how the weight rises and falls, by the same signs.
    importance_cap, importance_floor: bounds of the weight that corrects for the engine that sampled, of records with
        its log-probabilities; a cap of None: no correction.
    correction: the weight is of a token or a whole sequence; beyond its bounds it is cut to them, or 0.
    off_policy_mask: sequences with a negative advantage gain nothing where log(policy that sampled / policy), in the
        mean of their tokens, is above it.
    mask_truncated: rollouts that were cut off at their largest length train nothing. A mean over sequences counts them.
    top_entropy: the share of the tokens of a step that are trained, those with the highest entropy. The divergence is
        held at all.
    kl_coef: weight of the divergence from the reference. kl: Schulman's estimate of it from one token.
    kl_correction: the estimate is weighted by the ratio, as the tokens are not those of the policy itself.
    entropy_coef: weight of the entropy.
    mean_over: tokens of the step; sequences, each the mean of its tokens; constant: sequences, each the sum of its
        tokens over a constant. max_completion_length: that constant.
    """

    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = number(0.2, "above 0, at most 1")
    clip_high: float = number(0.2, "above 0, at most 1,000,000")
    delta: float | None = number(None, "above 0, at most 1,000,000")
    loss: Literal["clipped", "cispo", "sapo", "vespo"] = "clipped"
    sapo_temperature_pos: float = number(1.0, "above 0, at most 1,000,000")
    sapo_temperature_neg: float = number(1.05, "above 0, at most 1,000,000")
    vespo_k_pos: float = number(2.0, "not negative, at most 1,000,000")
    vespo_lambda_pos: float = number(3.0, "above 0, at most 1,000,000")
    vespo_k_neg: float = number(3.0, "not negative, at most 1,000,000")
    vespo_lambda_neg: float = number(2.0, "above 0, at most 1,000,000")
    importance_cap: float | None = number(2.0, "above 0, at most 1,000,000")
    importance_floor: float = number(0.0, "not negative, at most 1,000,000")
    correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    off_policy_mask: float | None = number(None, "not negative, at most 1,000,000")
    mask_truncated: bool = False
    top_entropy: float = number(1.0, "above 0, at most 1")
    kl_coef: float = number(0.0, "not negative, at most 1,000,000")
    kl: Literal["k1", "k2", "k3"] = "k3"
    kl_correction: bool = False
    entropy_coef: float = number(0.0, "not negative, at most 1,000,000")
    mean_over: Literal["token", "sequence", "constant"] = "token"
    max_completion_length: int | None = number(None, "at least 1", most=10**9)
    reader: ClassVar[str] = "rollouts"
    is_of_rollouts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.mean_over == "constant") != (self.max_completion_length is not None):
            given = f"train.objective: mean_over={self.mean_over}, max_completion_length={self.max_completion_length}"
            rule = "the sum over the tokens of a sequence is divided by the constant"
            raise UserError(given, rule, "give mean_over: constant and max_completion_length, or neither")
        if self.kl != "k3" and not self.kl_coef:
            raise UserError(f"train.objective.kl={self.kl}", "it has no effect without kl_coef", "give both")
        if self.kl_correction and not self.kl_coef:
            raise UserError("train.objective.kl_correction", "it has no effect without kl_coef", "give both")
        if self.loss == "vespo" and (self.ratio == "sequence" or self.correction.startswith("sequence")):
            given = f"train.objective: loss=vespo with ratio={self.ratio}, correction={self.correction}"
            raise UserError(given, "its weight is of the sequence already, from each token", "give both of tokens")
        if self.importance_cap is None and (self.correction, self.importance_floor) != ("token_truncate", 0.0):
            given = "train.objective: correction or importance_floor with importance_cap=null"
            raise UserError(given, "without a cap nothing is corrected", "give importance_cap")
        for prefix, losses in _READ_BY.items():
            for item in dataclasses.fields(self):
                has_effect = not item.name.startswith(prefix) or self.loss in losses
                if not has_effect and getattr(self, item.name) != item.default:
                    given = f"train.objective.{item.name}={getattr(self, item.name)} with loss={self.loss}"
                    raise UserError(given, f"it has an effect with loss {' or '.join(losses)}", "leave out one")

    @property
    def per(self) -> Per:
        """Tokens of the step, or its sequences."""
        return "token" if self.mean_over == "token" else "record"

    @property
    def is_of_sequences(self) -> bool:
        """Whether tokens of a sequence are compared, or averaged, so that it needs a row of its own."""
        if self.ratio == "sequence" or self.mean_over != "token" or self.off_policy_mask is not None:
            return True
        return self.loss == "vespo" or self.correction.startswith("sequence")

    @property
    def token_score(self) -> Score:
        """The entropy only for the bonus, and to choose tokens by it."""
        return "entropy" if self.entropy_coef > 0 or self.top_entropy < 1 else ""

    @property
    def has_first_pass(self) -> bool:
        """Only to choose tokens."""
        return self.top_entropy < 1

    @property
    def needs_base(self) -> bool:
        """Only for the KL penalty."""
        return self.kl_coef > 0


@dataclass(frozen=True, kw_only=True)
class Policy(_PolicyGradient):
    """Policy gradient from rollouts with their advantages."""

    kind: Literal["policy"] = "policy"


@dataclass(frozen=True, kw_only=True)
class Grpo(_PolicyGradient):
    """Policy gradient from rollouts with rewards: those of a group, completions of one prompt, are compared.

    scale_rewards: what divides the reward less the group's mean: the standard deviation of the group, that of all
    rollouts (batch), or nothing.
    """

    kind: Literal["grpo"] = "grpo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    reader: ClassVar[str] = "rewarded"
