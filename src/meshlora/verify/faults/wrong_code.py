"""Wrong code that several themes of faults put in the place of functions of the product.

Owns: these. Each takes the original and gives its replacement, or is the replacement itself. Does not own: wrong
code of one theme, which stands in its file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshlora.comm.groups import launcher_place
from meshlora.plan.grads import Segment


def segments_with(change: Callable[[Segment], Segment]) -> Callable[[Any], Any]:
    """What is summed over which axes, changed."""
    return lambda original: lambda factor, mesh: [change(segment) for segment in original(factor, mesh)]


def without_axes(of: Callable[[str], bool]) -> Callable[[Segment], Segment]:
    """A segment whose gradient is not summed over the axes of which `of` is true."""
    return lambda segment: dataclasses.replace(
        segment, grad_axes=frozenset(axis for axis in segment.grad_axes if not of(axis))
    )


def counted_dummy(batch: Any, sequences: Any, **_: Any) -> Any:
    if sequences:
        return batch
    return dataclasses.replace(batch, labels=batch.input_ids.clone(), num_trained_tokens=batch.input_ids.numel())


def rank() -> int:
    place = launcher_place()
    return place.rank if place else 0


def blocks_reversed(y: Tensor, x: Tensor, axis: Any) -> Tensor:
    return y.unflatten(0, (axis.size, -1)).flip(0).flatten(0, 1)
