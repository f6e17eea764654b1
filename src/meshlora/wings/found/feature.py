"""What this wing brings to the core: a plan for a family that no table has, found on a small model of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from weakref import WeakKeyDictionary

from meshlora.feature import Feature
from meshlora.plan.families.family import FamilyPlan
from meshlora.wings.found.finder import Found, find_plan
from meshlora.wings.found.kept import kept
from meshlora.wings.found.probe import small_model
from meshlora_ground.float64 import lift

# A model of at most so many parameters is its own twin.
_SMALL = 5_000_000
_BY_MODEL: WeakKeyDictionary[Any, Found] = WeakKeyDictionary()
# How a configuration becomes that of a twin; None: nobody has said it, and large models have no plan.
_SHRINK: list[Callable[[Any], Any]] = []


def use_twins(shrink: Callable[[Any], Any]) -> None:
    """Let plans of large models be found on the twin that `shrink` makes of their configuration."""
    _SHRINK[:] = [shrink]


def found_for(model: Any) -> Found | None:
    """What was found of `model` when it was planned; None: its family has a plan elsewhere."""
    return _BY_MODEL.get(model)


class _FoundPlans(Feature):
    def found_plan(self, model: Any, layers_name: str, experts: Collection[str]) -> FamilyPlan | None:
        if model not in _BY_MODEL:
            config = model.config
            if sum(parameter.numel() for parameter in model.parameters()) > _SMALL:
                if not _SHRINK:
                    return None
                config = _SHRINK[0](config)

            def find() -> Found:
                with lift():
                    return find_plan(small_model(config), layers_name, experts)

            _BY_MODEL[model] = kept(model, find)
        return _BY_MODEL[model].plan()


FEATURE = _FoundPlans()
