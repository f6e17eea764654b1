"""What is a router: it scores experts; a shared expert that is as wide as there are experts does not."""

from __future__ import annotations

import pytest
import torch

from meshlora.api import build_meta
from meshlora.plan.topology import Topology
from meshlora.plan.twin import twin_config


@pytest.mark.parametrize("shared_width", [8, 32])
def test_shared_expert_as_wide_as_there_are_experts_is_no_router(shared_width: int) -> None:
    """As in the default configuration of qwen3_next, 512 and 512."""
    config = twin_config("qwen3_next", num_experts=8, shared_expert_intermediate_size=shared_width)
    _, plan = build_meta(config, Topology.parse(""), dtype=torch.float32, disable_dropout=True)
    routers = {router.rpartition(".")[2] for rule in plan.experts.values() for router in rule.routers}
    assert routers == {"gate"}
