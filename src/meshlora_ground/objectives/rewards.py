"""The objective of a reward model: of two answers the better one is to have the higher score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meshlora_ground.numbers import number
from meshlora_ground.objective import Objective, Per
from meshlora_ground.tasks import set_labels


@dataclass(frozen=True, kw_only=True)
class Reward(Objective):
    """A reward model of pairs of answers, after Bradley and Terry: a head with one output, the score of an answer.

    center: weight of the square of the sum of a pair's scores, which holds them around 0; 0: nothing does.
    """

    kind: Literal["reward"] = "reward"
    center: float = number(0.0, "not negative, at most 1,000,000")
    reader: ClassVar[str] = "margins"
    unit: ClassVar[Per] = "pair"
    task: ClassVar[str] = "SEQ_CLS"

    def configure(self, config: Any) -> None:
        """As above, with the one label that transformers calls a score by."""
        super().configure(config)
        set_labels(config, ["LABEL_0"], None)
