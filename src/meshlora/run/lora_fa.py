"""LoRA-FA (Zhang et al., 2023, arXiv 2308.03303) as PEFT has it: A stays as it is, and B steps as full training would.

Owns: the correction of B's gradient, and the update. Does not own: which factors are frozen and which adapters are
refused (`run.optimizers`), the gradients (`train.gradsync`), groups and rates (`run.optimizer`).

With A fixed, W changes by s dB A. The gradient of B that moves W nearest to its own full gradient is `g (A A^T)^-1 /
s^2`. A A^T is of the whole A, whatever part of it a rank holds: it is put together once, when training starts. Of the
update PEFT's order is kept: weight decay after the step, and eps beside the uncorrected root of the second moment.
PEFT rounds the corrected gradient to bfloat16 wherever the machine can; here it is not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.adapter.attach import Factor, full_factor, runtime

_LEAST = 1e-8  # added to the diagonal of A A^T, as in PEFT


def corrections(model: Any, factors: Sequence[Factor]) -> dict[nn.Parameter, Tensor]:
    """B -> `(A A^T)^-1 / s^2`, `[r, r]`, by which its gradient is multiplied. Collective: each A is put together.

    factors: all of the active adapter on this rank.
    """
    state = runtime(model)
    assert state.active is not None
    targets, by_name = state.adapters[state.active].targets, {factor.name: factor for factor in factors}
    found = {}
    for name, factor in by_name.items():
        module, _, part = name.rpartition(".lora_")
        if part != "A":
            continue
        a = full_factor(factor.parameter.detach(), factor.rule, state.mesh)
        gram = a @ a.T + _LEAST * torch.eye(len(a), dtype=a.dtype, device=a.device)
        found[by_name[f"{module}.lora_B"].parameter] = torch.linalg.pinv(gram) / targets[module].scaling ** 2
    return found


class LoraFA(torch.optim.Optimizer):
    """Adam on corrected gradients.

    groups: of the factors that are trained, each with `lr` and `weight_decay`. corrections: see there.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        corrections: Mapping[nn.Parameter, Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.corrections = corrections

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every factor that has a gradient. closure: there is none."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad @ self.corrections[parameter], group)

    def _update(self, b: nn.Parameter, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[b]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(b), "exp_avg_sq": torch.zeros_like(b)}
        state["step"] = step = int(state["step"]) + 1  # a tensor, after resuming
        first, second = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first)  # in place: no copy of the moments
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        size = group["lr"] * math.sqrt(1 - second**step) / (1 - first**step)
        b.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-size)
        b.mul_(1 - group["lr"] * group["weight_decay"])  # after the step, as PEFT has it; torch's AdamW decays before
