"""Mutations of what rides with a region's input under sp: which faults there are, and what each breaks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshlora.layers.early_a import Pack
from meshlora.model import regions
from meshlora.verify.faults.fault import mutation


def _given_to_the_next(original: Any) -> Any:
    return lambda packed, width, riders: original(packed, width, riders[1:] + riders[:1])


def _a_without_scale(original: Any) -> Any:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dx, riders, *das = original(ctx, *grads)
        pairs = zip(das, ctx.how, strict=True)
        return dx, riders, *(None if da is None else da / scale for da, (scale, _) in pairs)

    return backward


def _input_of_the_base_alone(original: Any) -> Any:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dx, *rest = original(ctx, *grads)
        return grads[0][:, : dx.shape[1]], *rest

    return backward


OF_RIDING = dict(
    [
        mutation(
            "ride_ends_at_the_next_linear",
            "a linear adds the z of its own A to what it returns",
            "riding_together",
            (regions, "unpack", _given_to_the_next),
        ),
        mutation(
            "ride_gradient_without_scale",
            "the gradient of an A that works before the gather has the LoRA scale",
            "riding scale",
            (Pack, "backward", _a_without_scale),
        ),
        mutation(
            "ride_gradient_stops_at_a",
            "the gradient of a region's input has the terms of every A",
            "riding",
            (Pack, "backward", _input_of_the_base_alone),
        ),
    ]
)
