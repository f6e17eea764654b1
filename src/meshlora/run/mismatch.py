"""The mismatch between trainer and engine: the same policy computed twice, by other kernels, in other precisions.

Owns: its statistics over a step. Does not own: the weight that corrects for it (`run.objectives`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_KNOWN = "engine_known"
_GIVEN = ("engine_gap", "engine_kl", "engine_weight", "engine_weight_squared", "engine_truncated")
LARGEST = "largest_engine_gap"
OF_FILE = (LARGEST, "engine_kl", "effective_samples")  # in the metrics, and not in the line of a step


def mismatch_sums(old: Tensor, engine: Tensor, is_cut: Tensor) -> dict[str, Tensor]:
    """The statistics of each token `[B, S]`, to be summed; 0 where the engine's log-probability is not known (NaN).

    old: the trainer's. is_cut: bool `[B, S]`, whether the weight of a token is out of its bounds.
    """
    is_known = ~engine.isnan()
    gap = torch.where(is_known, old - engine, 0.0)
    weight = gap.exp()
    given = (gap.abs(), weight - 1 - gap, weight, weight**2, is_cut.to(gap.dtype))
    found = {name: torch.where(is_known, value, 0.0) for name, value in zip(_GIVEN, given, strict=True)}
    return {**found, _KNOWN: is_known.to(gap.dtype)}


def largest_gap(old: Tensor, engine: Tensor) -> Tensor:
    """|log p - log p of the engine| of each token `[B, S]`, 0 where that is not known: to take the largest of."""
    return torch.where(engine.isnan(), 0.0, old - engine).abs()


def with_mismatch(means: Mapping[str, float]) -> dict[str, float]:
    """The reported statistics of a step from the sums of `mismatch_sums` among them, all divided by one number.

    engine_gap: mean of |log p - log p of the engine| over the tokens whose engine is known; largest_engine_gap: its
    largest. engine_kl: estimate of KL(engine || trainer), w - 1 - log w with w = p / p of the engine (Schulman's k3).
    effective_samples: (sum w)^2 / (n sum w^2), 1 if both agree. engine_truncated: share of tokens whose weight is out
    of its bounds.
    """
    if _KNOWN not in means:
        return dict(means)
    known = means[_KNOWN]
    rest = {name: value for name, value in means.items() if name not in (*_GIVEN, _KNOWN, LARGEST)}
    if not known:
        return rest
    gap, kl, weight, squared, truncated = (means[name] / known for name in _GIVEN)
    return rest | {
        "engine_gap": gap,
        LARGEST: means[LARGEST],
        "engine_kl": kl,
        "effective_samples": weight**2 / squared,
        "engine_truncated": truncated,
    }
