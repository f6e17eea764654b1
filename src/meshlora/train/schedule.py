"""Learning-rate schedules: pure functions of the optimizer step."""

from __future__ import annotations


def linear(step: int, *, peak: float, warmup_steps: int, steps: int) -> float:
    """Rate of optimizer step `step` (from 0): up linearly over `warmup_steps`, then down linearly to zero at `steps`.

    Neither end wastes a step: step 0 of a warm-up has 1/warmup_steps of the peak, the last step is still above zero.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * max(0.0, (steps - step) / max(1, steps - warmup_steps))
