"""What objectives share that compare the policy with a frozen one."""

from __future__ import annotations

from dataclasses import dataclass

from meshlora_ground.errors import UserError
from meshlora_ground.objective import Objective


@dataclass(frozen=True, kw_only=True)
class Referenced(Objective):
    """An objective that may compare the policy with a frozen one.

    reference: the frozen policy. start: the adapter that the run goes on from, or the base where it begins a new one,
    as in TRL; base: the base without an adapter; else the folder of an adapter.
    """

    reference: str = "start"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reference:
            rule = "it must name a policy"
            raise UserError("train.objective.reference is empty", rule, "give start, base or a folder")
        if self.reference != "start" and not self.needs_base:
            rule = "it has no effect without kl_coef"
            raise UserError(f"train.objective.reference={self.reference}", rule, "give both, or neither")
