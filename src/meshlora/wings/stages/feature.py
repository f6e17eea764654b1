"""What this wing brings to the core: the cut of a plan into stages, and the way of forwards through those of a rank."""

from __future__ import annotations

from typing import Any

from meshlora.adapter.plan import AdapterPlan
from meshlora.feature import Feature
from meshlora.plan.rules import ModelPlan
from meshlora.wings.stages.cut import check_trained, plan_of_rank, with_stages
from meshlora.wings.stages.hold import hold_stages
from meshlora_ground.topology import LAYERS


class Wing(Feature):
    axes = LAYERS
    with_stages = staticmethod(with_stages)
    plan_of_rank = staticmethod(plan_of_rank)
    pipeline = staticmethod(hold_stages)

    def check_adapter(self, model: Any, plan: ModelPlan, adapter: AdapterPlan) -> None:
        check_trained(model, plan, adapter.parameters, adapter.weights)
