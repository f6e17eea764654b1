"""Loss scaling for float16: the loss is multiplied before the backward, so that small gradients do not become zero.

Owns: the scale, when it grows and falls, which steps are skipped; the rules and numbers are those of
`torch.amp.GradScaler`. Does not own: the norm that decides, one number that all ranks share (`train.gradsync`), so that
every rank takes or skips a step with the others; the file that its state goes into (`train.checkpoint.state`).

A skipped step changes neither parameters nor moments, and AdamW does not count it. The schedule and the order of the
data do: they are functions of the step. (Trainers that keep a scheduler as state hold the rate back instead.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from meshlora.adapter.attach import Factor
from meshlora.common.errors import MeshloraError

_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000
# Below it an overflow is not one of the scale: a gradient of 1 would be a subnormal number.
_SMALLEST = 2.0**-14


class LossScale:
    """The scale of a run. Powers of two: a multiplication in float32, and its undoing, are exact.

    Attributes:
        scale: what the loss is multiplied by. good_steps: steps since it changed. skipped: steps that were not taken.
    """

    def __init__(self, scale: float = 2.0**16, *, interval: int = _INTERVAL) -> None:
        self.scale, self.good_steps, self.skipped, self.interval = scale, 0, 0, interval

    @torch.no_grad()
    def unscale(self, factors: Sequence[Factor]) -> None:
        """Make gradients those of the loss; after they are summed, before they are clipped. They are float32."""
        for factor in factors:
            assert factor.parameter.grad is not None, factor.name
            assert factor.parameter.grad.dtype == torch.float32, factor.name
            factor.parameter.grad.mul_(1 / self.scale)

    def takes_step(self, grad_norm: float, *, step: int) -> bool:
        """Whether optimizer step `step`, from 0, with this global norm is taken; the scale of the next follows.

        Raises:
            MeshloraError: the gradient is not finite, whatever the scale.
        """
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
        """What goes into a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave."""
        self.scale = float(state["scale"])
        self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])
