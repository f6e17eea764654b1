"""Mixtures of experts on their own axes: each expert's tensors against one-process transformers + peft."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

FAMILIES = ("deepseek_v3", "gpt_oss", "granitemoe", "llama4_text", "mixtral", "qwen2_moe", "qwen3_moe")
# Between them: each axis of experts alone and with others, copies of experts, sp and not, both routes.
TOPOLOGIES = ("dp=2,ep=2", "tp=2,sp,ep=2", "tp=2,etp=2", "dp=2,tp=2,ep=2", "dp=2,tp=2,sp,ep=2,etp=2,two-stage")
_ON_EXPERTS: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_on_experts_is_the_one_a_single_process_produces(family: str, prove: Prove) -> None:
    outcomes = prove(family=family, topologies=TOPOLOGIES, steps=2)
    assert [str(outcome.topology) for outcome in outcomes] == list(TOPOLOGIES)
    for outcome in outcomes:
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)
        (gradients,) = [phase for phase in outcome.phases if phase.name == "gradients"]
        assert {f"experts.{e}.down_proj.lora_A" for e in (0, 7)} <= {
            ".".join(r.name.split(".")[-4:]) for r in gradients.results
        }


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "mixtral"])
@pytest.mark.parametrize(
    "lora",
    [
        {"target_parameters": ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]},
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "share_experts": True},
        {"target_parameters": ["experts.up_proj"], "share_experts": True, "init_lora_weights": "gaussian"},
        {"target_parameters": ["experts.down_proj"], "use_rslora": True, "target_modules": []},
    ],
    ids=["pieces", "shared", "shared piece", "one projection"],
)
def test_adapters_on_parts_and_for_all_experts(family: str, lora: dict[str, Any], prove: Prove) -> None:
    for outcome in prove(family=family, topologies=("dp=2,tp=2,ep=2,etp=2",), steps=2, lora=_ON_EXPERTS | lora):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


def test_adapter_on_a_router_beside_experts(prove: Prove) -> None:
    lora = _ON_EXPERTS | {"target_parameters": ["mlp.gate.weight", "experts.down_proj"]}
    for outcome in prove(family="qwen3_moe", topologies=("tp=2,sp,ep=2", "tp=2,etp=2"), steps=2, lora=lora):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_low_precision_takes_the_references_routing(family: str, dtype: str, prove: Prove) -> None:
    for outcome in prove(family=family, topologies=("tp=2,sp,ep=2", "dp=2,etp=2"), dtype=dtype):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)
