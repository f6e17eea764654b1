"""What this wing brings to the core: routed experts, their routers, and adapters on them."""

from __future__ import annotations

from meshlora.feature import Feature
from meshlora.wings.experts.forms import find_experts, lacking_conversions, odd_experts
from meshlora.wings.experts.module import replace_experts
from meshlora.wings.experts.per_expert import engine_config, engine_factors
from meshlora.wings.experts.router import adopt_router
from meshlora.wings.experts.same_tokens import watch_tokens
from meshlora.wings.experts.targets import (
    check_targets,
    matched_parameters,
    out_of_reach,
    with_stored_parameters,
    with_whole_projections,
)


class Wing(Feature):
    axes = ("ep", "etp")
    find_experts = staticmethod(find_experts)
    lacking_conversions = staticmethod(lacking_conversions)
    planned_block = staticmethod(odd_experts)
    replace = staticmethod(replace_experts)
    adopt = staticmethod(adopt_router)
    watch = staticmethod(watch_tokens)
    with_names_of_model = staticmethod(with_whole_projections)
    targets_among_parameters = staticmethod(matched_parameters)
    check_targets = staticmethod(check_targets)
    with_stored_parameters = staticmethod(with_stored_parameters)
    as_peft_reads = staticmethod(out_of_reach)
    config_of_file = staticmethod(engine_config)
    factors_of_file = staticmethod(engine_factors)
