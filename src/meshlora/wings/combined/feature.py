"""What this wing brings to the core: sums of adapters, and several active ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshlora.feature import Feature
from meshlora.wings.combined.sums import add_weighted_adapter, set_adapter


class Wing(Feature):
    def methods(self, model: Any) -> Mapping[str, Callable[..., Any]]:
        return {"set_adapter": set_adapter, "add_weighted_adapter": add_weighted_adapter}
