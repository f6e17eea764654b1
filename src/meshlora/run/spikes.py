"""Loss spikes: when the losses of steps have jumped up, several in a row.

Owns: the rule, and its state after the steps of a run that resumes. Rank 0 keeps it; what it says of a step reaches
the others in the sums of that step (`run.step_sums`), so that no rank decides by itself. Does not own: what happens
then (`run.trained`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from meshlora.run.config.endings import LossSpike
from meshlora.run.config.run_file import TrainConfig
from meshlora.run.watch.metrics import records_until

# Fewer losses have no median to compare with.
_FEWEST = 5


class SpikeWatch:
    """Counts the steps in a row whose loss is a spike. losses: of steps before, in order.

    >>> watch = SpikeWatch(LossSpike(factor=2.0, patience=2), [1.0, 1.1, 0.9, 1.0, 1.0, 2.5])
    >>> watch.limit, watch.sees(2.1)
    (2.0, True)
    """

    def __init__(self, options: LossSpike, losses: Iterable[float] = ()) -> None:
        self.options, self.in_row = options, 0
        self.before = deque[float](maxlen=options.window)
        for loss in losses:
            self.sees(loss)

    @property
    def limit(self) -> float:
        """The loss above which the next step is the last that patience allows; infinity if none would be."""
        return self._spike if self.in_row + 1 >= self.options.patience else math.inf

    def sees(self, loss: float) -> bool:
        """Count a step; returns whether patience is at its end, and then begins anew. Only finite losses count."""
        if not math.isfinite(loss):
            return False
        self.in_row = self.in_row + 1 if loss > self._spike else 0
        self.before.append(loss)
        if self.in_row < self.options.patience:
            return False
        self.in_row = 0
        return True

    @property
    def _spike(self) -> float:
        """The loss above which a step is a spike."""
        options, limit = self.options, math.inf
        if options.above is not None:
            limit = options.above
        if options.factor is not None and len(self.before) >= min(_FEWEST, options.window):
            middle = statistics.median(self.before)
            if middle > 0:  # losses of rewards lie around 0: no multiple of them is far away
                limit = min(limit, options.factor * middle)
        return limit


def notes_of_spikes(train: TrainConfig) -> list[str]:
    """What is done at loss spikes, in words."""
    options = train.on_spike
    if not options.is_on:
        return []
    done = {"stop": "the run stops", "note": "a line says so"}[options.then]
    return [f"train.on_spike: {done} after {options.patience} losses in a row above {options.words}"]


def losses_of_steps(metrics: Path, done: int) -> list[float]:
    """The losses of a run's first `done` steps; those that are not finite are not there."""
    return [values["loss"] for values in records_until(metrics, done) if "loss" in values]
