"""What a plan refuses in a block that it splits, and what it computes whole beside experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from meshlora.errors import UnsupportedError
from meshlora.plan.derive import plan_model
from meshlora.plan.topology import Topology
from meshlora.plan.twin import twin_config

TP = Topology(tp=2, sp=True)


def _model(family: str, **overrides: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(twin_config(family, **overrides), experts_implementation="eager")


def test_a_module_for_each_head_is_refused() -> None:
    """Norms need no word in a plan, but these are of one head each, and a rank has other heads."""
    model = _model("stablelm", qk_layernorm=True)
    with pytest.raises(UnsupportedError, match=r"layernorm\.norms: a module for each head is not split yet"):
        plan_model(model, TP)
    assert plan_model(model, Topology())


def test_a_split_of_what_is_no_linear_is_refused() -> None:
    model = _model("llama")
    model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, "layers.*.input_layernorm": "colwise"}
    with pytest.raises(UnsupportedError, match=r"input_layernorm: .*it is not a linear layer"):
        plan_model(model, TP)


def test_what_mixes_tokens_beside_experts_sees_whole_sequences() -> None:
    """A router, and the gate of a shared expert, see single tokens; any other module with a matrix may not."""
    model = _model("qwen2_moe")
    model.model.layers[1].mlp.mixer = nn.Linear(model.config.hidden_size, model.config.hidden_size, device="meta")
    found = {region.name for region in plan_model(model, TP).regions}
    mlp = "model.layers.1.mlp"
    assert {f"{mlp}.mixer", f"{mlp}.shared_expert"} <= found
    assert not found & {f"{mlp}.gate", f"{mlp}.shared_expert_gate", f"{mlp}.experts"}
