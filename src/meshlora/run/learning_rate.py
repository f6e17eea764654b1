"""Learning-rate schedules: pure functions of the optimizer step.

Owns: the rate of each step. Does not own: the compatibility of settings (`config`), who sets it (`run.trained`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

from meshlora.run.config.run_file import TrainConfig

# Twenty times the highest rates of recipes, LoRA+'s B and tiny models included.
_HIGH = 0.05


def learning_rate(step: int, *, options: TrainConfig, steps: int) -> float:
    """Rate of optimizer step `step` of `steps`, from 0, by `options.schedule`.

    Every schedule but `cycle` first rises linearly for `warmup_steps`. Neither end wastes a step: step 0 of a warm-up
    has 1/warmup_steps of the peak rate, unless `warmup_from_zero`, and the last step of a decay is still above the
    final rate. `cosine_of_run` is the cosine of the whole run, of which the warm-up replaces the first part. Those with
    transformers' names are its functions, rounding included: see docs/run-file.md.
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
        start = options.timescale or max(1, options.warmup_steps)
        return options.lr * math.sqrt(start / (start + t))
    course: str = options.schedule
    if options.schedule == "warmup_stable_decay":
        t, remaining = max(0, t - (remaining - options.decay_steps)), options.decay_steps
        course = options.decay_type
    x = min(1.0, t / max(1, remaining))
    if options.schedule == "cosine_with_restarts":
        # In floats, as transformers has it: by whole numbers some restarts would be a step earlier.
        x = options.num_cycles * x % 1.0
    left = (1.0 - x) ** options.power if options.schedule == "polynomial" else _LEFT[course](x)
    return options.min_lr + (options.lr - options.min_lr) * left


def _half_cosine(x: float) -> float:
    return (1.0 + math.cos(math.pi * x)) / 2.0


# Remaining fraction of the way from peak to final rate, after fraction `x` of the decay.
_LEFT: Mapping[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1.0 - x,
    "cosine": _half_cosine,
    "cosine_of_run": _half_cosine,
    "cosine_with_restarts": _half_cosine,
    "1-sqrt": lambda x: 1.0 - math.sqrt(x),
}


def notes_of_rate(options: TrainConfig) -> list[str]:
    """What to say of a peak rate that is far above those of published recipes."""
    # A cycle gives every rate by itself, as `meshlora lr-find` does, which goes so far on purpose.
    if options.schedule == "cycle" or options.lr <= _HIGH:
        return []
    return [
        f"train.lr={options.lr:g} is far above what adapters are trained with, 1e-5 to 1e-3: a run diverges there; "
        "meshlora lr-find tries rates"
    ]


def piecewise_linear(step: int, points: Mapping[int, float]) -> float:
    """Linear interpolation at `step` between `points`, step -> rate; constant beyond the first and last."""
    known = sorted(points.items())
    for (start, low), (end, high) in itertools.pairwise(known):
        if start <= step < end:
            return low + (high - low) * (step - start) / (end - start)
    return known[0][1] if step < known[0][0] else known[-1][1]
