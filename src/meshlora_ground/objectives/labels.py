"""Objectives of other heads than that of a language model: labels of texts and words, embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from meshlora_ground.errors import UserError
from meshlora_ground.numbers import number
from meshlora_ground.objective import Objective, Per
from meshlora_ground.tasks import set_labels


@dataclass(frozen=True, kw_only=True)
class _Labelled(Objective):
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
class Embed(Objective):
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
