"""What this wing brings to the core: the plans of families that transformers has none of, or one that gathers."""

from __future__ import annotations

from meshlora.feature import Feature
from meshlora.wings.tables.tables import explicit_plan


class Wing(Feature):
    known_plan = staticmethod(explicit_plan)
