"""Mixtures of experts on their own axes: each expert's tensors against one-process transformers + peft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshlora.verify.proof import Outcome
from tests.conftest import Prove

TOPOLOGIES = (
    *("dp=2,ep=2", "tp=2,ep=2", "tp=2,etp=2", "tp=2,sp,ep=2", "tp=2,sp,etp=2", "dp=4,ep=2", "dp=2,tp=2,sp,ep=4"),
    *("dp=2,tp=2,sp,ep=2,etp=2", "dp=2,tp=2,sp,ep=2,etp=2,two-stage"),
)
# By default one family on two topologies, with every axis, both routes and what sp changes; dp as copies of experts
# and as ranks with experts. And each form of experts on two ranks: gate and up in another order, biases, sides that
# PEFT takes for each other, shared experts, with and without sp. Of gpt_oss those with an adapter on parts are below.
FEW = ("dp=4,ep=2", "dp=2,tp=2,sp,ep=2,etp=2,two-stage")
ONE_OF_EACH = {
    "deepseek_v3": "tp=2,ep=2",
    "gpt_oss": "tp=2,sp,etp=2",
    "granitemoe": "tp=2,etp=2",
    "llama4_text": "tp=2,ep=2",
    "qwen2_moe": "tp=2,sp,ep=2",
}
EIGHT_RANKS = ("dp=4,tp=2,sp,ep=2,etp=2", "dp=2,tp=4,sp,ep=4,etp=2,two-stage", "dp=4,tp=2,ep=2,etp=2")
_ON_EXPERTS: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "topologies", "steps"),
    [
        ("qwen3_moe", FEW, 1),
        *(
            pytest.param(family, (topology,), 1, marks=[] if family != "gpt_oss" else pytest.mark.proof)
            for family, topology in ONE_OF_EACH.items()
        ),
        *(
            pytest.param(family, TOPOLOGIES, 5, marks=pytest.mark.proof)
            for family in ("qwen3_moe", "mixtral", *ONE_OF_EACH)
        ),
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
    "shared piece": {"target_parameters": ["experts.up_proj"], "share_experts": True, "init_lora_weights": "gaussian"},
    "one projection": {"target_parameters": ["experts.down_proj"], "use_rslora": True, "target_modules": []},
}


@pytest.mark.parametrize(
    ("name", "family", "topology", "steps"),
    [
        # By default pieces and what is shared, each with gate and up in another order than mixtral's.
        ("pieces", "gpt_oss", "tp=2,etp=2", 1),
        pytest.param("pieces", "llama4_text", "tp=2,etp=2", 1, marks=pytest.mark.proof),
        pytest.param("shared", "llama4_text", "dp=2,tp=2,ep=2,etp=2", 1, marks=pytest.mark.long),
        pytest.param("shared", "mixtral", "tp=2,sp,ep=2", 1, marks=pytest.mark.proof),
        pytest.param("shared piece", "gpt_oss", "tp=2,ep=2", 1, marks=pytest.mark.proof),
        pytest.param("one projection", "mixtral", "tp=2,etp=2", 1, marks=pytest.mark.proof),
        *(
            pytest.param(name, family, "dp=2,tp=2,ep=2,etp=2", 2, marks=pytest.mark.proof)
            for name in ON_PARTS
            for family in ("gpt_oss", "llama4_text", "mixtral")
        ),
    ],
)
def test_adapters_on_parts_and_for_all_experts(name: str, family: str, topology: str, steps: int, prove: Prove) -> None:
    lora = _ON_EXPERTS | ON_PARTS[name]
    for outcome in prove(family=family, topologies=(topology,), steps=steps, lora=lora):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.long
def test_rates_of_lora_plus_go_by_the_letters_of_peft(prove: Prove) -> None:
    """On llama4's experts PEFT's A is on the output side."""
    for outcome in prove(family="llama4_text", topologies=("tp=2,sp,ep=2",), steps=1, lora_plus_ratio=4.0):
        assert outcome.passed, (outcome.divergence, outcome.error)


@pytest.mark.long
@pytest.mark.parametrize("topology", ["tp=2,sp,ep=2", pytest.param("tp=2,etp=2", marks=pytest.mark.proof)])
def test_adapter_on_a_router_beside_experts(topology: str, prove: Prove) -> None:
    lora = _ON_EXPERTS | {"target_parameters": ["mlp.gate.weight", "experts.down_proj"]}
    for outcome in prove(family="qwen3_moe", topologies=(topology,), steps=1, lora=lora):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "dtype", "topology", "steps"),
    [
        ("deepseek_v3", "bfloat16", "tp=2,sp,ep=2", 1),
        *(
            pytest.param(family, dtype, topology, 3, marks=pytest.mark.proof)
            for family in ("deepseek_v3", "qwen3_moe")
            for dtype in ("float32", "bfloat16")
            for topology in ("dp=2,etp=2", "tp=2,sp,ep=2")
        ),
    ],
)
def test_low_precision_takes_the_references_routing(
    family: str, dtype: str, topology: str, steps: int, prove: Prove
) -> None:
    for outcome in prove(family=family, topologies=(topology,), dtype=dtype, steps=steps):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)
