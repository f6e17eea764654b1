"""Early stopping: when the loss on held-out data, or a metric on answers, has not improved for a while.

Owns: the rule, and its state after the evaluations of a run that resumes. Does not own: evaluations
(`run.evaluate`), that all ranks agree (`run.trained`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from meshlora.run.config.endings import LOSS, EarlyStopping
from meshlora.run.watch.metrics import records_until


class Patience:
    """Counts the evaluations in a row that were no improvement. values: of evaluations before, in order.

    >>> patience = Patience(EarlyStopping(patience=2), [1.0, 0.9, 0.95])
    >>> patience.sees(0.91), patience.best
    (True, 0.9)
    """

    def __init__(self, options: EarlyStopping, values: Iterable[float] = ()) -> None:
        self.options, self.best, self.num_without = options, options.worst, 0
        for value in values:
            self.sees(value)

    @property
    def is_out(self) -> bool:
        """Whether the run is to end."""
        return 0 < self.options.patience <= self.num_without  # a patience of 0 is none

    def sees(self, value: float) -> bool:
        """Count an evaluation; returns `is_out`. A value that is no number is no improvement."""
        if self.options.is_better(value, self.best, by=self.options.min_delta):
            self.best, self.num_without = value, 0
        else:
            self.num_without += 1
        return self.is_out


def values_until(metrics: Path, done: int, every: int, metric: str = LOSS) -> dict[int, float]:
    """Step -> value of `metric` in a run's evaluations during its first `done` steps, each `every` steps, as the rule
    sees them.

    Others, as before the first step or after the last of a run that goes on with more, are left out. One that is not
    there: NaN.
    """
    found = dict[int, float]()
    for values in records_until(metrics, done):
        step = values["step"]
        if "eval_tokens" in values and every and step and step % every == 0:
            found[step] = values.get(f"eval_{metric}", math.nan)
    return found
