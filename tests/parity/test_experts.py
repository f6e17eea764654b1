"""Mixtures of experts on their own axes: each expert's tensors against one-process transformers + peft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshlora.verify.proof import Outcome
from tests.conftest import Prove

FAMILIES = ("deepseek_v3", "gpt_oss", "granitemoe", "llama4_text", "mixtral", "qwen2_moe")
TOPOLOGIES = (
    *("dp=2,ep=2", "tp=2,ep=2", "tp=2,etp=2", "tp=2,sp,ep=2", "tp=2,sp,etp=2", "dp=4,ep=2", "dp=2,tp=2,sp,ep=4"),
    *("dp=2,tp=2,sp,ep=2,etp=2", "dp=2,tp=2,sp,ep=2,etp=2,two-stage"),
)
# Between them every axis, both routes and what sp changes; dp as copies of experts and as ranks with experts.
FEW = ("tp=2,ep=2", "dp=2,tp=2,sp,ep=2,etp=2,two-stage")
EIGHT_RANKS = ("dp=4,tp=2,sp,ep=2,etp=2", "dp=2,tp=4,sp,ep=4,etp=2,two-stage", "dp=4,tp=2,ep=2,etp=2")
_ON_EXPERTS: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("family", "topologies", "steps"),
    [
        ("qwen3_moe", TOPOLOGIES, 3),
        *((family, FEW, 2) for family in FAMILIES),
        *(pytest.param(family, TOPOLOGIES, 5, marks=pytest.mark.proof) for family in ("qwen3_moe", *FAMILIES)),
    ],
)
def test_adapter_on_experts_is_the_one_a_single_process_produces(
    family: str, topologies: tuple[str, ...], steps: int, prove_and_note: Callable[..., list[Outcome]]
) -> None:
    outcomes = prove_and_note(family=family, topologies=topologies, steps=steps)
    assert [str(outcome.topology) for outcome in outcomes] == list(topologies)
    for outcome in outcomes:
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)
        (gradients,) = [phase for phase in outcome.phases if phase.name == "gradients"]
        assert {f"experts.{e}.down_proj.lora_A" for e in (0, 7)} <= {
            ".".join(r.name.split(".")[-4:]) for r in gradients.results
        }


@pytest.mark.proof
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_every_axis_at_once_on_eight_ranks(family: str, prove: Prove) -> None:
    """edp, ep and etp are all above 1, which four ranks do not allow."""
    for outcome in prove(family=family, topologies=EIGHT_RANKS):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


ON_PARTS: dict[str, dict[str, Any]] = {
    "pieces": {"target_parameters": ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]},
    "shared": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "share_experts": True},
    "shared piece": {
        "target_parameters": ["experts.up_proj"],
        "share_experts": True,
        "init_lora_weights": "gaussian",
    },
    "one projection": {"target_parameters": ["experts.down_proj"], "use_rslora": True, "target_modules": []},
}
# By default each way with gate and up in another order: pairs of rows, sides the other way round, blocks.
OFTEN_ON_PARTS = {
    *(("pieces", "gpt_oss"), ("pieces", "llama4_text"), ("shared", "llama4_text")),
    *(("shared", "mixtral"), ("shared piece", "gpt_oss"), ("one projection", "mixtral")),
}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        (name, family) if (name, family) in OFTEN_ON_PARTS else pytest.param(name, family, marks=pytest.mark.proof)
        for name in ON_PARTS
        for family in ("gpt_oss", "llama4_text", "mixtral")
    ],
)
def test_adapters_on_parts_and_for_all_experts(name: str, family: str, prove: Prove) -> None:
    lora = _ON_EXPERTS | ON_PARTS[name]
    for outcome in prove(family=family, topologies=("dp=2,tp=2,ep=2,etp=2",), steps=2, lora=lora):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


def test_rates_of_lora_plus_go_by_the_letters_of_peft(prove: Prove) -> None:
    """On llama4's experts PEFT's A is on the output side."""
    for outcome in prove(family="llama4_text", topologies=("tp=2,sp,ep=2",), steps=2, lora_plus_ratio=4.0):
        assert outcome.passed, (outcome.divergence, outcome.error)


def test_adapter_on_a_router_beside_experts(prove: Prove) -> None:
    lora = _ON_EXPERTS | {"target_parameters": ["mlp.gate.weight", "experts.down_proj"]}
    for outcome in prove(family="qwen3_moe", topologies=("tp=2,sp,ep=2", "tp=2,etp=2"), steps=2, lora=lora):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.parametrize(
    ("family", "dtype", "topology"),
    [
        ("deepseek_v3", "bfloat16", "tp=2,sp,ep=2"),
        ("qwen3_moe", "float32", "dp=2,etp=2"),
        pytest.param("deepseek_v3", "float32", "dp=2,etp=2", marks=pytest.mark.proof),
        pytest.param("deepseek_v3", "float32", "tp=2,sp,ep=2", marks=pytest.mark.proof),
        pytest.param("deepseek_v3", "bfloat16", "dp=2,etp=2", marks=pytest.mark.proof),
        pytest.param("qwen3_moe", "float32", "tp=2,sp,ep=2", marks=pytest.mark.proof),
        pytest.param("qwen3_moe", "bfloat16", "dp=2,etp=2", marks=pytest.mark.proof),
        pytest.param("qwen3_moe", "bfloat16", "tp=2,sp,ep=2", marks=pytest.mark.proof),
    ],
)
def test_low_precision_takes_the_references_routing(family: str, dtype: str, topology: str, prove: Prove) -> None:
    for outcome in prove(family=family, topologies=(topology,), dtype=dtype):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)
