"""The arguments of a formula, and its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Sums = Mapping[str, Tensor]  # name -> a sum, reported as a mean over the step; of LARGEST the largest value


@dataclass(frozen=True)
class Seen:
    """The arguments of a formula; a dummy batch has no rows.

    log_p, log_ref: log-probabilities `[B, S]` of pi and, if the objective needs them, of ref; 0 where untrained.
    is_trained: bool `[B, S]`. columns: name -> `[B, S]`, from the records. is_training: False in evaluation.
    point: what the step's first pass found, if the objective has one: the reference point `[]`, `[2]` of
        `entropy_point`, or `[B, 2]` of `ordered_pairs`. score: `[B, S]`, its `token_score`, if it has one.
    """

    log_p: Tensor
    log_ref: Tensor | None
    is_trained: Tensor
    columns: Mapping[str, Tensor]
    is_training: bool
    point: Tensor | None = None
    score: Tensor | None = None


Formula = Callable[[Any, Seen], tuple[Tensor, Sums]]  # -> (losses, values to report), both to be summed
