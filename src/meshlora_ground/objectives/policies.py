"""Objectives of rollouts: policy gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from meshlora_ground.errors import UserError
from meshlora_ground.numbers import number
from meshlora_ground.objective import Per
from meshlora_ground.objectives.referenced import Referenced


@dataclass(frozen=True, kw_only=True)
class _PolicyGradient(Referenced):
    """Policy gradient from rollouts, weighted by the ratio of the policy to the one that acted.

    ratio: of each token, or of a whole sequence: the geometric mean over its tokens.
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    loss: clipped: a ratio that has left the interval gains nothing more. cispo: the clipped ratio is a constant weight.
    importance_cap: the largest weight that corrects for the engine that sampled, of records with its
        log-probabilities; None: no correction.
    kl_coef: weight of the divergence from the reference. kl: Schulman's estimate of it from one token.
    entropy_coef: weight of the entropy.
    mean_over: tokens of the step; sequences, each the mean of its tokens; constant: sequences, each the sum of its
        tokens over a constant. max_completion_length: that constant.
    """

    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = number(0.2, "above 0, at most 1")
    clip_high: float = number(0.2, "above 0, at most 1,000,000")
    loss: Literal["clipped", "cispo"] = "clipped"
    importance_cap: float | None = number(2.0, "above 0, at most 1,000,000")
    kl_coef: float = number(0.0, "not negative, at most 1,000,000")
    kl: Literal["k1", "k2", "k3"] = "k3"
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

    @property
    def per(self) -> Per:
        """Tokens of the step, or its sequences."""
        return "token" if self.mean_over == "token" else "record"

    @property
    def needs_entropy(self) -> bool:
        """Only for the bonus."""
        return self.entropy_coef > 0

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
