"""Learning-rate schedules: pure functions of the optimizer step.

Owns: the rate of every step of a run. Does not own: rates of groups relative to it (`train.optimizer`), nor which
settings go together (`config`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

from meshlora.config.run import TrainConfig


def learning_rate(step: int, *, options: TrainConfig, steps: int) -> float:
    """Rate of optimizer step `step` of `steps`, from 0, by `options.schedule`.

    Every schedule but `cycle` first rises linearly for `warmup_steps`; t is then the number of steps since, of T that
    remain. Neither end wastes a step: step 0 of a warm-up has 1/warmup_steps of the peak, and the last step of a decay
    is still above its end.
    """
    if options.schedule == "cycle":
        return piecewise_linear(step, options.cycle)
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    t, remaining = step - options.warmup_steps, max(1, steps - options.warmup_steps)
    if options.schedule == "inverse_sqrt":
        # Vaswani et al. (2017): the peak is where the warm-up ends; a run without one counts from its first step.
        start = max(1, options.warmup_steps)
        return options.lr * math.sqrt(start / (start + t))
    if options.schedule == "warmup_stable_decay":
        t, remaining = max(0, t - (remaining - options.decay_steps)), options.decay_steps
    span = options.lr - options.min_lr
    return options.min_lr + span * _LEFT[options.schedule](min(1.0, t / max(1, remaining)))


# Share of the way from the peak to the end that is still to go, when `x` of the time has passed.
_LEFT: Mapping[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: (1.0 + math.cos(math.pi * x)) / 2.0,
    "warmup_stable_decay": lambda x: 1.0 - x,
}


def piecewise_linear(step: int, points: Mapping[int, float]) -> float:
    """The rate at `step` on the straight lines between `points`, step -> rate; outside of them that of the end."""
    known = sorted(points.items())
    for (start, low), (end, high) in itertools.pairwise(known):
        if start <= step < end:
            return low + (high - low) * (step - start) / (end - start)
    return known[0][1] if step < known[0][0] else known[-1][1]
