"""Updates of adapters: an optimizer may only step on gradients that are those of all ranks.

Owns: which gradients are (`mark_finished`), and the refusal of every other update of a split adapter. Does not own:
making them so (`train.gradsync`), the step that does it in order (`train.step`).

A loop written for one process calls `loss.backward()` and `optimizer.step()`. On a split model these gradients are of
this rank's part alone: it would train another adapter, without an error. torch tells every optimizer's step to us.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from meshlora_ground.errors import UserError

_FINISHED, _SPLIT = "_meshlora_finished", "_meshlora_split"


def mark_finished(grad: Tensor) -> None:
    """Say that `grad` is of all ranks."""
    setattr(grad, _FINISHED, True)


def is_finished(grad: Tensor) -> bool:
    """Whether `grad` is of all ranks already."""
    return hasattr(grad, _FINISHED)


def guard_updates(name: str, parameter: nn.Parameter) -> None:
    """Refuse updates of `parameter`, of an adapter on more than one rank, by gradients of this rank alone."""
    setattr(parameter, _SPLIT, name)
    _watch()


@functools.cache
def _watch() -> None:
    # Of all optimizers of the process, hence once.
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is not None and hasattr(parameter, _SPLIT) and not is_finished(grad):
                raise UserError(
                    f"optimizer.step() on the gradient of {getattr(parameter, _SPLIT)} as backward has left it",
                    "on a mesh it is of this rank's part alone until a step has summed it over the ranks",
                    "use `with meshlora.step(model, optimizer) as step: step.backward(loss)`, which steps the "
                    "optimizer at its end, or call meshlora.finish_gradients before optimizer.step()",
                )
