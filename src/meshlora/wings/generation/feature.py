"""What this wing brings to the core: generation by a split model's own methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from meshlora.feature import Feature
from meshlora.wings.generation.continuous import generate_batch, refuse_manager
from meshlora.wings.generation.rows import all_finished, generate
from meshlora_ground.compat import transformers_models


class Wing(Feature):
    def methods(self, model: Any) -> Mapping[str, Callable[..., Any]]:
        if not hasattr(model, "generate"):
            return {}
        transformers_models.finish_together(model, functools.partial(all_finished, model))
        return {"generate": generate, "generate_batch": generate_batch, "init_continuous_batching": refuse_manager}
