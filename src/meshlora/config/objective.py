"""Training objectives as values with all of their parameters, shared by the trainer and the judge.

Owns: parameters and their rules; for each objective the records it trains on, whether it needs the frozen base, and
what its loss is a mean over. Does not own: formulas. The trainer has its own (`train.objectives`), and so has the
judge (`oracle.objectives`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args

import pydantic

from meshlora.common.errors import UserError
from meshlora.common.tasks import CAUSAL, set_labels, set_task
from meshlora.config.numbers import check_numbers, number

# The unit that a loss is a mean over; pairs and records do not share rows with others.
Per = Literal["token", "pair", "record"]
COUNTED: dict[Per, str] = {"token": "trained_tokens", "pair": "pairs", "record": "records"}  # keys in results


@dataclass(frozen=True, kw_only=True)
class _Objective:
    """reader: key of `data.READERS`. per: the unit the loss is a mean over. is_of_text: it trains on plain text.

    trained_row: the one row of an example's two that is trained on; the loss then has a reference point, the
    divergence from the base over the other rows of all examples of the step. None: all rows are trained on.
    always_needs_base: for any parameters. task: of the model (`common.tasks`). is_of_step: the loss compares all
    examples of a step with each other, so a first pass over it is needed too.
    """

    kind: str
    reader: ClassVar[str] = "text"
    per: ClassVar[Per] = "token"
    is_of_text: ClassVar[bool] = False
    trained_row: ClassVar[int | None] = None
    always_needs_base: ClassVar[bool] = False
    task: ClassVar[str] = CAUSAL
    is_of_step: ClassVar[bool] = False

    @property
    def has_first_pass(self) -> bool:
        """Whether a step begins with a pass over all of its examples, without gradients."""
        return self.trained_row is not None or self.is_of_step

    def configure(self, config: Any) -> None:
        """Make the configuration of a model that of its task, with the head that is trained.

        Raises:
            UnsupportedError: transformers has no such model of this family.
        """
        set_task(config, self.task)

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


@dataclass(frozen=True, kw_only=True)
class _Labelled(_Objective):
    """labels: the names of the labels, in the order of the head's outputs; num_labels: or only their number."""

    labels: list[str] = field(default_factory=list)
    num_labels: int | None = number(None, "at least 1", most=10**6)

    def __post_init__(self) -> None:
        super().__post_init__()
        where = f"train.objective.labels={self.labels}"
        if (not self.labels) == (self.num_labels is None):
            given = "neither labels nor num_labels" if not self.labels else "both labels and num_labels"
            raise UserError(f"train.objective: {given}", "the head has as many outputs as there are labels", "give one")
        if len(set(self.labels)) < len(self.labels):
            raise UserError(where, "each label has one name of its own")

    @property
    def names(self) -> list[str]:
        """The names of all labels, as transformers has them in `id2label`."""
        return self.labels or [f"LABEL_{number}" for number in range(self.num_labels or 0)]

    @property
    def numbers(self) -> Mapping[str, int]:
        """Label -> its number."""
        return {name: number for number, name in enumerate(self.names)}

    def configure(self, config: Any) -> None:
        """As above, with the labels as transformers keeps them."""
        super().configure(config)
        set_labels(config, self.names, None)


@dataclass(frozen=True, kw_only=True)
class Classify(_Labelled):
    """Classification of texts.

    problem: single: one label a text, cross-entropy. multi: any number of them, binary cross-entropy. regression:
    numbers, squared error.
    """

    kind: Literal["classify"] = "classify"
    problem: Literal["single", "multi", "regression"] = "single"
    reader: ClassVar[str] = "labelled"
    per: ClassVar[Per] = "record"
    task: ClassVar[str] = "SEQ_CLS"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.problem == "single" and len(self.names) < 2:
            rule = "with one label there is nothing to choose"
            raise UserError("train.objective: one label", rule, "give two or more, or problem: regression")

    def configure(self, config: Any) -> None:
        """As above, with transformers' name of the problem."""
        super().configure(config)
        names = {"single": "single_label_classification", "multi": "multi_label_classification"}
        config.problem_type = names.get(self.problem, self.problem)


@dataclass(frozen=True, kw_only=True)
class ClassifyTokens(_Labelled):
    """Classification of the words of a text, each by its first token."""

    kind: Literal["classify_tokens"] = "classify_tokens"
    reader: ClassVar[str] = "labelled_words"
    task: ClassVar[str] = "TOKEN_CLS"


@dataclass(frozen=True, kw_only=True)
class Embed(_Objective):
    """Embeddings of texts by contrast (InfoNCE): each anchor, its positive, and all others of the global batch.

    pooling: of the hidden states of a text's tokens: their mean, the last token's or the first one's. temperature:
    divides the similarities. normalize: compare directions (cosine), not lengths.
    """

    kind: Literal["embed"] = "embed"
    pooling: Literal["mean", "last", "cls"] = "mean"
    temperature: float = number(0.05, "above 0, at most 1,000,000")
    normalize: bool = True
    reader: ClassVar[str] = "similar"
    per: ClassVar[Per] = "record"
    task: ClassVar[str] = "FEATURE_EXTRACTION"
    is_of_step: ClassVar[bool] = True


Objective = Annotated[
    Sft | Policy | Dpo | Orpo | Kto | Classify | ClassifyTokens | Embed, pydantic.Discriminator("kind")
]
TEXT = Sft()  # what a model is for if nothing is said
KINDS: dict[str, type[Objective]] = {kind.kind: kind for kind in get_args(get_args(Objective)[0])}
