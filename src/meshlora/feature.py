"""What a wing brings to the core, and which wings there are.

Owns: the interface, and the list. Does not own: what a wing does: that is in its folder in `wings`, whose `feature.py`
has its `FEATURE`. The core imports no wing: it asks all of them, at the places that the methods below name. A wing that
has nothing to say at a place leaves its method out.

A wing is one folder and one line of `WINGS`; docs/adding/wing.md shows one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshlora.adapter.plan import AdapterPlan
    from meshlora.comm.groups import Mesh
    from meshlora.layers.held_tokens import ContextCut
    from meshlora.model.pipeline import Pipeline
    from meshlora.plan.rules import ModelPlan
    from meshlora_ground.topology import Topology

# In the order in which they are asked.
WINGS = ("stages", "experts", "quantized", "kernels", "context", "packed_rows", "images", "generation")


class Feature:
    """What a wing brings: each method is called where its first line says, for every model."""

    def check(self, topology: Topology, given: Mapping[str, bool]) -> None:
        """`loading.load`, before anything is read: refuse what is not proved with the wing.

        given: what is used, as messages name it -> whether it is.

        Raises:
            UnsupportedError: names the first that is.
        """

    def with_stages(self, model: Any, plan: ModelPlan) -> ModelPlan:
        """`plan.derive`, when a split model is planned: its plan, with the cut of its layers into stages.

        Raises:
            UserError, UnsupportedError: there is none that is proved.
        """
        return plan

    def plan_of_rank(self, plan: ModelPlan, rank: int) -> ModelPlan:
        """`loading.load`, when ranks are known: what of `plan` pp rank `rank` has."""
        return plan

    def check_adapter(self, model: Any, plan: ModelPlan, adapter: AdapterPlan) -> None:
        """`adapter.plan`, when an adapter is planned: refuse one that cannot be trained on the plan of the model.

        Raises:
            UnsupportedError: names what cannot be.
        """

    def pipeline(self, model: Any, plan: ModelPlan, mesh: Mesh) -> Pipeline | None:
        """`model.inject`, before anything else: the way of forwards through the layers that this rank has.

        What other ranks have is taken out of `model`. None: this rank has all of it.
        """
        return None

    def borders(self, model: Any, plan: ModelPlan, context: ContextCut) -> None:
        """`model.regions`, when the borders of a split model's layers are installed: install those of the wing.

        context: the cut of the model's forwards over cp.
        """


@functools.cache
def features() -> tuple[Feature, ...]:
    """Those of all wings."""
    return tuple(importlib.import_module(f"meshlora.wings.{name}.feature").FEATURE for name in WINGS)
