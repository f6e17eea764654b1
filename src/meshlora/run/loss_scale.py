"""Loss scaling for float16: the loss is multiplied before the backward, so that small gradients do not underflow.

Owns: the scale, its growth and backoff, skipped steps; rules and constants are those of `torch.amp.GradScaler`. Does
not own: the norm that decides, which all ranks share (`train.gradsync`), so that all take or skip a step together; the
file of its state (`run.checkpoint.manifest`).

A skipped step changes neither parameters nor moments, and AdamW does not count it. The schedule and the data order do:
they are functions of the step. (Trainers with a stateful scheduler hold the rate back instead.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from meshlora.adapter.attach import Factor
from meshlora_ground.errors import MeshloraError

_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000
# Below it the scale is not to blame: a gradient of 1 would be subnormal.
_SMALLEST = 2.0**-14


class LossScale:
    """The scale of a run. Powers of two: a multiplication in float32, and its undoing, are exact.

    Attributes:
        scale: multiplier of the loss. good_steps: steps since it changed. skipped: number of skipped steps.
    """

    def __init__(self, scale: float = 2.0**16, *, interval: int = _INTERVAL) -> None:
        self.scale, self.good_steps, self.skipped, self.interval = scale, 0, 0, interval

    @torch.no_grad()
    def unscale(self, factors: Sequence[Factor]) -> None:
        """Divide the (float32) gradients by the scale; after they are summed, before they are clipped."""
        for factor in factors:
            assert factor.parameter.grad is not None, factor.name
            assert factor.parameter.grad.dtype == torch.float32, factor.name
            factor.parameter.grad.mul_(1 / self.scale)

    def takes_step(self, grad_norm: float, *, step: int) -> bool:
        """Whether optimizer step `step`, from 0, with this global norm is taken. Updates the scale. Raises:
        MeshloraError: the gradient is not finite at any scale."""
        if math.isfinite(grad_norm):
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.scale, self.good_steps = self.scale * _GROWTH, 0
            return True
        self.scale, self.good_steps, self.skipped = self.scale * _BACKOFF, 0, self.skipped + 1
        if self.scale < _SMALLEST:
            raise MeshloraError(
                f"step {step + 1}: the gradient norm is {grad_norm} at every loss scale down to {_SMALLEST}; use "
                "model.dtype: bfloat16 or float32, or look at the data"
            )
        return False

    def state(self) -> dict[str, float]:
        """State for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the result of `state`."""
        self.scale = float(state["scale"])
        self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])
