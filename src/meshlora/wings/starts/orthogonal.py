"""`init_lora_weights: orthogonal`: A and B of rows that are orthogonal to each other, which leave the base as it is.

As in PEFT, with the rows of an orthogonal `[r, r]`: A has the odd ones, B the even ones, so that `B @ A` is 0 although
neither is. Drawn from (seed, name) as every other factor.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from peft import LoraConfig
from torch import Tensor

from meshlora.adapter.initialization import Start, generator_of
from meshlora.adapter.targets.resolve import Target
from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import UserError

_SCALE = 10.0  # PEFT's: what both are divided by


class Orthogonal(Start):
    """A `[r, in]` and B `[out, r]`."""

    def check(self, config: LoraConfig, targets: Mapping[str, Target], plan: ModelPlan) -> None:
        """Raises: UserError: an odd rank."""
        for target in targets.values():
            if target.r % 2:
                given = f"init_lora_weights='orthogonal' with rank {target.r} of {target.name}"
                raise UserError(given, "half of its rows are for A, half for B", "use an even rank")

    def draw(self, target: Target, *, seed: int) -> dict[str, Tensor]:
        """The full factors, in float32 on the CPU."""
        half = target.r // 2

        def normal(rows: int, columns: int, name: str) -> Tensor:
            return torch.randn(rows, columns, generator=generator_of(seed, name))

        q, _ = torch.linalg.qr(normal(target.r, target.r, target.name_of("Q")))
        a = normal(target.in_features, half, target.name_of("A")) @ q[0::2]
        b = normal(half, target.out_features, target.name_of("B")).T @ q[1::2]
        return {"A": a.T / _SCALE, "B": b / _SCALE}
