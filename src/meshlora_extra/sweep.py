"""A sweep of learning rates over the steps of one short run: its rates, and what its losses suggest.

Owns: the rates, the smoothing, the rule. Does not own: the run (`run.run`), the picture (`meshlora_extra.plot`).

Leslie N. Smith, "Cyclical Learning Rates for Training Neural Networks" (arXiv 1506.01186), section 3.3, with rates at
equal ratios as in fastai. The rule is fastai's `minimum`: a tenth of the rate at which the smoothed loss is lowest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from meshlora_ground.errors import UserError

RULE = "a tenth of the rate at which the smoothed loss is lowest (fastai's `minimum`)"
# Steps before and after each that its smoothed loss is the mean of: a trailing average would be late, at higher rates.
_AROUND = 3
_LEAST = 10


@dataclass(frozen=True)
class Sweep:
    """rates, losses: by step. smooth: the losses, smoothed. suggested: by `RULE`. note: what to doubt."""

    rates: Sequence[float]
    losses: Sequence[float]
    smooth: Sequence[float]
    suggested: float
    note: str


def rates_of(lowest: float, highest: float, steps: int) -> list[float]:
    """`steps` rates at equal ratios, from `lowest` to `highest`.

    >>> rates_of(1e-6, 1e-2, 3)
    [1e-06, 0.0001, 0.01]

    Raises:
        UserError: not 0 < lowest < highest, or too few steps.
    """
    if not 0 < lowest < highest < math.inf:
        raise UserError(f"--from {lowest:g} --to {highest:g}", "rates rise from above 0", "as in --from 1e-6 --to 1e-1")
    if steps < _LEAST:
        raise UserError(f"--steps {steps}", f"a sweep has at least {_LEAST}")
    ratio = math.log10(highest / lowest)
    return [float(f"{lowest * 10 ** (ratio * step / (steps - 1)):.6g}") for step in range(steps)]


def sweep_of(rates: Sequence[float], losses: Sequence[float]) -> Sweep:
    """What a run suggests, which may have ended early. Raises: UserError: too few steps, or a loss that never fell."""
    if len(losses) < _LEAST:
        raise UserError(f"a sweep of {len(losses)} steps", f"it needs {_LEAST} with a finite loss", "lower --from")
    rates, smooth = rates[: len(losses)], _smoothed(losses)
    lowest = min(range(len(smooth)), key=smooth.__getitem__)
    if lowest < _AROUND:
        raise UserError("this sweep", "the loss only rose from its first rates", "lower --from")
    note = ""
    if lowest >= len(smooth) - _AROUND:
        note = "the loss still fell at the highest rate: --to may be higher, and so may the suggestion"
    return Sweep(rates, losses, smooth, float(f"{rates[lowest] / 10:.2g}"), note)


def _smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of each loss and its neighbours, as many on either side."""
    found = []
    for step in range(len(losses)):
        around = min(_AROUND, step, len(losses) - 1 - step)
        found.append(statistics.fmean(losses[step - around : step + around + 1]))
    return found
