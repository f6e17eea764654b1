"""What this wing brings to the core: which families are proved, on which axes, with which libraries."""

from __future__ import annotations

from meshlora.feature import Feature
from meshlora.plan.rules import ModelPlan
from meshlora.wings.proved.families import PROVED, SEE_LATER_TOKENS, check_proved_here


class _Proved(Feature):
    def is_proved_causal(self, model_type: str) -> bool:
        return model_type in PROVED - SEE_LATER_TOKENS

    def is_proved(self, plan: ModelPlan) -> bool:
        check_proved_here(plan.model_type, plan.topology, has_experts=bool(plan.experts))
        return True


FEATURE = _Proved()
