"""What this wing brings to the core: which families are proved, on which axes, with which libraries."""

from __future__ import annotations

from meshlora.feature import Feature
from meshlora.plan.rules import ModelPlan
from meshlora.wings.proved.families import PROVED, SEE_LATER_TOKENS, check_proved_here


class Wing(Feature):
    def is_proved_causal(self, model_type: str) -> bool:
        return model_type in PROVED - SEE_LATER_TOKENS

    def is_proved(self, plan: ModelPlan) -> bool:
        # The record of bart and kin is of their decoders alone.
        model_type = f"{plan.model_type} with its encoder" if plan.encoder else plan.model_type
        check_proved_here(model_type, plan.topology, has_experts=bool(plan.experts))
        return True
