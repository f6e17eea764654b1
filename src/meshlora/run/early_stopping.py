"""Early stopping: when the loss on held-out data has not fallen for a while.

Owns: the rule, and its state after the evaluations of a run that resumes. Does not own: evaluations
(`run.evaluate`), that all ranks agree (`run.trained`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from meshlora.run.config.run_file import EarlyStopping
from meshlora.run.watch.metrics import lines_until


class Patience:
    """Counts the evaluations in a row that were no improvement. losses: of evaluations before, in order.

    >>> patience = Patience(EarlyStopping(patience=2), [1.0, 0.9, 0.95])
    >>> patience.sees(0.91), patience.best
    (True, 0.9)
    """

    def __init__(self, options: EarlyStopping, losses: Iterable[float] = ()) -> None:
        self.options, self.best, self.num_without = options, math.inf, 0
        for loss in losses:
            self.sees(loss)

    @property
    def is_out(self) -> bool:
        """Whether the run is to end."""
        return 0 < self.options.patience <= self.num_without  # a patience of 0 is none

    def sees(self, loss: float) -> bool:
        """Count an evaluation; returns `is_out`. A loss that is no number is no improvement."""
        if loss < self.best - self.options.min_delta:
            self.best, self.num_without = loss, 0
        else:
            self.num_without += 1
        return self.is_out


def losses_until(metrics: Path, done: int, every: int) -> list[float]:
    """The losses of a run's evaluations during its first `done` steps, each `every` steps, as the rule sees them.

    Others, as after the last step of a run that goes on with more, are left out. One that is not there: NaN.
    """
    found = list[float]()
    for line in lines_until(metrics, done)[0]:
        values = json.loads(line)
        if "eval_tokens" in values and every and values["step"] % every == 0:
            found.append(values.get("eval_loss", math.nan))
    return found
