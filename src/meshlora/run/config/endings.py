"""When a run ends before its last step, as its run file says it.

Owns: names, types and defaults of those keys. Does not own: what is seen during a run (`run.early_stopping`,
`run.spikes`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from meshlora_ground.errors import UserError
from meshlora_ground.numbers import check_numbers, number

_FACTOR = 1e6  # far above any use
LOSS = "loss"  # what early stopping watches, unless told otherwise


@dataclass(frozen=True)
class EarlyStopping:
    """When a run ends before its last step: what is watched has not improved for a while.

    Attributes:
        patience: evaluations in a row without an improvement, after which the run ends; 0: it never does.
        min_delta: how far beyond the best value so far another one is an improvement.
        metric: what is watched, by `train.keep_best` too: the held-out loss, of which less is better, or one of
            `generate.metrics`, of which more is.
    """

    patience: int = number(0, "not negative", most=10**6)
    min_delta: float = number(0.0, "not negative", most=_FACTOR)
    metric: str = LOSS

    @property
    def is_of_answers(self) -> bool:
        """Whether more is better."""
        return self.metric != LOSS

    @property
    def worst(self) -> float:
        """What any value is better than."""
        return -math.inf if self.is_of_answers else math.inf

    def is_better(self, value: float, best: float, *, by: float = 0.0) -> bool:
        """Whether `value` is better than `best`, by more than `by`. NaN never is."""
        return value > best + by if self.is_of_answers else value < best - by

    def __post_init__(self) -> None:
        check_numbers("train.early_stopping", self)
        if self.min_delta and not self.patience:
            raise UserError("train.early_stopping.min_delta", "it has no effect without patience", "give both")


@dataclass(frozen=True)
class LossSpike:
    """When the losses of training steps have jumped up, and what is done then.

    Attributes:
        factor: a spike is a loss above so many times the median of the steps before. above: or above this one.
        window: number of steps before that the median is of.
        patience: spikes in a row before anything is done.
        then: stop: a checkpoint is saved, and the run ends with an error; note: it is said.
    """

    factor: float | None = number(None, "above 1", most=_FACTOR)
    above: float | None = number(None, most=_FACTOR)
    window: int = number(50, "at least 1", most=10**4)
    patience: int = number(3, "at least 1", most=10**6)
    then: Literal["note", "stop"] = "stop"

    def __post_init__(self) -> None:
        check_numbers("train.on_spike", self)
        if self.window != 50 and self.factor is None:
            raise UserError("train.on_spike.window", "it has no effect without factor", "give both")
        if not self.is_on and (self.patience, self.then) != (3, "stop"):
            raise UserError("train.on_spike", "nothing says what a spike is", "give factor, as in factor: 3, or above")

    @property
    def is_on(self) -> bool:
        """Whether losses are watched."""
        return self.factor is not None or self.above is not None

    @property
    def words(self) -> str:
        """What a spike is above, in words, as in `3 times the median of 50 steps before`."""
        found = list[str]()
        if self.factor is not None:
            found.append(f"{self.factor:g} times the median of {self.window} steps before")
        if self.above is not None:
            found.append(f"{self.above:g}")
        return " or ".join(found)
