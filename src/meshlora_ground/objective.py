"""A training objective: a value with all of its parameters, shared by the trainer and the judge; and the plainest one.

Does not own: the others (`meshlora_ground.objectives`); formulas, of which the trainer has its own (`run.objectives`),
and so has the judge (`meshlora_judge.objectives`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meshlora_ground.errors import UserError
from meshlora_ground.numbers import check_numbers, number
from meshlora_ground.tasks import CAUSAL, set_task

Score = Literal["", "entropy", "log_sum_sq"]  # of `train.losses.TokenScores`
# The unit that a loss is a mean over; pairs and records do not share rows with others.
Per = Literal["token", "pair", "record"]
COUNTED: dict[Per, str] = {"token": "trained_tokens", "pair": "pairs", "record": "records"}  # keys in results


@dataclass(frozen=True, kw_only=True)
class Objective:
    """reader: key of `data.READERS`. unit: what the loss is a mean over. is_of_text: it trains on plain text.

    trained_row: the one row of an example's two that is trained on; the loss then has a reference point, the
    divergence from the base over the other rows of all examples of the step. None: all rows are trained on.
    always_needs_base: for any parameters. task: of the model (`meshlora_ground.tasks`). is_of_step: the loss compares
    all examples of a step with each other, so a first pass over it is needed too. is_of_rollouts: its records may come
    as a stream, and may say the experts of each token.
    """

    kind: str
    reader: ClassVar[str] = "text"
    unit: ClassVar[Per] = "token"
    is_of_text: ClassVar[bool] = False
    trained_row: ClassVar[int | None] = None
    always_needs_base: ClassVar[bool] = False
    task: ClassVar[str] = CAUSAL
    is_of_step: ClassVar[bool] = False
    is_of_rollouts: ClassVar[bool] = False

    @property
    def per(self) -> Per:
        """The unit the loss is a mean over."""
        return self.unit

    @property
    def token_score(self) -> Score:
        """What the loss uses of each trained token beside its log-probability."""
        return ""

    @property
    def is_summed(self) -> bool:
        """Whether it needs a sum over tokens alone, in training, and not the log-probability of each."""
        return False

    @property
    def has_first_pass(self) -> bool:
        """Whether a step begins with a pass over all of its examples, without gradients."""
        return self.trained_row is not None or self.is_of_step

    def configure(self, config: Any) -> None:
        """Make the configuration of a model that of its task. Raises: UnsupportedError: its family has none of it."""
        set_task(config, self.task)

    @property
    def needs_base(self) -> bool:
        """Whether the loss uses outputs of a frozen policy: the base, or the base with a reference adapter."""
        return self.always_needs_base

    def __post_init__(self) -> None:
        check_numbers("train.objective", self)


@dataclass(frozen=True, kw_only=True)
class Sft(Objective):
    """Cross-entropy of text. label_smoothing: the probability mass spread uniformly over the vocabulary.

    loss: dft: each token is weighted by its own probability.
    """

    kind: Literal["sft"] = "sft"
    loss: Literal["nll", "dft"] = "nll"
    label_smoothing: float = number(0.0, "in [0, 1)")
    is_of_text: ClassVar[bool] = True

    @property
    def is_summed(self) -> bool:
        """Of nll the sum is all."""
        return self.loss == "nll"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss == "dft":
            given, rule = "train.objective: loss=dft with label_smoothing", "dft is of the probability of the label"
            raise UserError(given, rule, "leave out one of the two")


TEXT = Sft()  # what a model is for if nothing is said
