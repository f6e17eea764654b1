"""Learning-rate schedules: pure functions of the optimizer step.

Owns: the rate of each step. Does not own: the compatibility of settings (`config`), who sets it (`run.trained`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

from meshlora.run.config.run_file import TrainConfig


def learning_rate(step: int, *, options: TrainConfig, steps: int) -> float:
    """Rate of optimizer step `step` of `steps`, from 0, by `options.schedule`.

    Every schedule but `cycle` first rises linearly for `warmup_steps`. Neither end wastes a step: step 0 of a warm-up
    has 1/warmup_steps of the peak rate, unless `warmup_from_zero`, and the last step of a decay is still above the
    final rate. `cosine_of_run` is the cosine of the whole run, of which the warm-up replaces the first part.
    """
    if options.schedule == "cycle":
        return piecewise_linear(step, options.cycle)
    if step < options.warmup_steps:
        return options.lr * (step + (not options.warmup_from_zero)) / options.warmup_steps
    t, remaining = step - options.warmup_steps, max(1, steps - options.warmup_steps)
    if options.schedule == "cosine_of_run":
        t, remaining = step, steps
    if options.schedule == "inverse_sqrt":
        # Vaswani et al. (2017): the peak is at the end of the warm-up; without one, at the first step.
        start = max(1, options.warmup_steps)
        return options.lr * math.sqrt(start / (start + t))
    if options.schedule == "warmup_stable_decay":
        t, remaining = max(0, t - (remaining - options.decay_steps)), options.decay_steps
    span = options.lr - options.min_lr
    return options.min_lr + span * _LEFT[options.schedule](min(1.0, t / max(1, remaining)))


# Remaining fraction of the way from peak to final rate, after fraction `x` of the decay.
_LEFT: Mapping[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: (1.0 + math.cos(math.pi * x)) / 2.0,
    "cosine_of_run": lambda x: (1.0 + math.cos(math.pi * x)) / 2.0,
    "warmup_stable_decay": lambda x: 1.0 - x,
}


def piecewise_linear(step: int, points: Mapping[int, float]) -> float:
    """Linear interpolation at `step` between `points`, step -> rate; constant beyond the first and last."""
    known = sorted(points.items())
    for (start, low), (end, high) in itertools.pairwise(known):
        if start <= step < end:
            return low + (high - low) * (step - start) / (end - start)
    return known[0][1] if step < known[0][0] else known[-1][1]
