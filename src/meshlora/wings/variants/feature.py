"""What this wing brings to the core: what an adapter may train beside A and B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from meshlora.adapter.targets.resolve import Target
from meshlora.feature import Feature
from meshlora.wings.variants.bias_of_b import BiasOfB
from meshlora.wings.variants.magnitudes import Magnitudes, first_magnitude


class Wing(Feature):
    def vary(self, model: Any, leaf: Any, adapter: str, target: Target, parts: Mapping[str, Tensor]) -> None:
        if "magnitude" in target.further:
            magnitude = parts.get("magnitude")
            if magnitude is None:
                magnitude = first_magnitude(model, leaf, adapter, target.name)
            leaf.variants[adapter] = Magnitudes({"magnitude": magnitude})
        elif "bias" in target.further:
            b = leaf.factor_b(adapter)
            leaf.variants[adapter] = BiasOfB({"bias": parts.get("bias", b.new_zeros(len(b)))})
