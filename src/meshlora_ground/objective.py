"""Training objectives as values with all of their parameters, shared by the trainer and the judge.

Does not own: formulas. The trainer has its own (`run.objectives`), and so has the judge (`meshlora_judge.objectives`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from meshlora_ground.errors import UserError
from meshlora_ground.numbers import check_numbers, number
from meshlora_ground.tasks import CAUSAL, set_labels, set_task

# The unit that a loss is a mean over; pairs and records do not share rows with others.
Per = Literal["token", "pair", "record"]
COUNTED: dict[Per, str] = {"token": "trained_tokens", "pair": "pairs", "record": "records"}  # keys in results


@dataclass(frozen=True, kw_only=True)
class _Objective:
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
    def needs_entropy(self) -> bool:
        """Whether the loss uses the entropy at each trained token."""
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
class Sft(_Objective):
    """Cross-entropy of text. label_smoothing: the probability mass spread uniformly over the vocabulary."""

    kind: Literal["sft"] = "sft"
    label_smoothing: float = number(0.0, "in [0, 1)")
    is_of_text: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Referenced(_Objective):
    """An objective that may compare the policy with a frozen one.

    reference: the frozen policy. start: the adapter that the run goes on from, or the base where it begins a new one,
    as in TRL; base: the base without an adapter; else the folder of an adapter.
    """

    reference: str = "start"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reference:
            rule = "it must name a policy"
            raise UserError("train.objective.reference is empty", rule, "give start, base or a folder")
        if self.reference != "start" and not self.needs_base:
            rule = "it has no effect without kl_coef"
            raise UserError(f"train.objective.reference={self.reference}", rule, "give both, or neither")


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
class Orpo(_Objective):
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
    unit: ClassVar[Per] = "record"
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
    unit: ClassVar[Per] = "record"
    task: ClassVar[str] = "FEATURE_EXTRACTION"
    is_of_step: ClassVar[bool] = True


Objective = Sft | Policy | Grpo | Dpo | Orpo | Kto | Classify | ClassifyTokens | Embed
TEXT = Sft()  # what a model is for if nothing is said
KINDS: dict[str, type[Objective]] = {kind.kind: kind for kind in get_args(Objective)}
