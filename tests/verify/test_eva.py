"""Starts of adapters on meshes are those of one process: EVA's, which look at data, and orthogonal ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from meshlora.adapter.initialization import start_of
from meshlora.adapter.targets.resolve import resolve_targets
from meshlora.plan.derive import plan_model
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.conftest import Prove

_ALL = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


@pytest.mark.long
@pytest.mark.parametrize(
    "request_",
    [
        {"family": "llama", "topologies": ("tp=2,sp",)},
        {"family": "qwen3", "topologies": ("dp=2,dp_shard",)},
        *(
            pytest.param(given, marks=pytest.mark.proof)
            for given in (
                {"family": "llama", "topologies": ("cp=2", "dp=2,tp=2")},
                {"family": "gpt2", "topologies": ("tp=2",)},
                {"family": "gemma2", "topologies": ("dp=2",), "packing": True},
                {"family": "qwen3", "topologies": ("tp=2",), "quantization": "nf4"},
                {"family": "qwen3", "topologies": ("tp=2",), "lora": _ALL | {"use_dora": True, "use_rslora": True}},
                {"family": "llama", "topologies": ("tp=2",), "lora": _ALL | {"eva_config": {"whiten": True, "rho": 1}}},
                {"family": "llama", "topologies": ("dp=2",), "lora": _ALL | {"eva_config": {"use_label_mask": False}}},
                {"family": "mixtral", "topologies": ("tp=2,sp,ep=2",), "lora": _ALL | {"target_modules": ["q_proj"]}},
            )
        ),
    ],
    ids=str,
)
def test_start_is_that_of_peft_on_every_mesh(request_: dict[str, Any], prove: Prove) -> None:
    lora = request_.get("lora", _ALL) | {"init_lora_weights": "eva"}
    outcomes = prove(**{"steps": 2} | request_ | {"lora": lora})
    assert all(o.passed for o in outcomes), [(o.topology, o.divergence, o.error) for o in outcomes]
    assert all("eva" in {phase.name for phase in o.phases} for o in outcomes)


@pytest.mark.long
@pytest.mark.parametrize(
    "lora",
    [
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "orthogonal", "use_dora": True},  # what it multiplies to is 0 in float32
        {"init_lora_weights": False, "use_dora": True},
    ],
)
def test_start_that_looks_at_no_data_is_proved(lora: dict[str, Any], prove: Prove) -> None:
    outcomes = prove(family="llama", topologies=("tp=2,sp",), steps=2, lora=_ALL | lora)
    assert all(o.passed for o in outcomes), [(o.topology, o.divergence, o.error) for o in outcomes]


def test_orthogonal_factors_are_drawn_as_peft_defines_them() -> None:
    config = LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights="orthogonal")
    model = AutoModelForCausalLM.from_config(twin_config("llama"))
    targets = resolve_targets(model, plan_model(model, Topology()), config)
    theirs = dict(get_peft_model(model, config).named_parameters())
    for name, target in targets.items():
        ours = start_of(config).draw(target, seed=0)
        a, b = ours["A"], ours["B"]
        assert a.any()
        assert b.any()
        torch.testing.assert_close(b @ a, torch.zeros(b.shape[0], a.shape[1]), rtol=0, atol=1e-6)
        for factor, part in ((a, "A"), (b, "B")):
            other = theirs[f"base_model.model.{name}.lora_{part}.default.weight"]
            assert factor.shape == other.shape
            assert torch.linalg.matrix_rank(factor) == torch.linalg.matrix_rank(other) == 2
            # Drawn otherwise, and as large.
            assert float(factor.norm() / other.detach().norm()) == pytest.approx(1, abs=0.3)
