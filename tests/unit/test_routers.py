"""What is a router: it scores experts; a shared expert that is as wide as there are experts does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import meshlora
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.blueprints import build_meta


@pytest.mark.parametrize("shared_width", [8, 32])
def test_shared_expert_as_wide_as_there_are_experts_is_no_router(shared_width: int) -> None:
    """As in the default configuration of qwen3_next, 512 and 512."""
    config = twin_config("qwen3_next", num_experts=8, shared_expert_intermediate_size=shared_width)
    _, plan = build_meta(config, Topology.parse(""), dtype=torch.float32, disable_dropout=True)
    routers = {router.rpartition(".")[2] for rule in plan.experts.values() for router in rule.routers}
    assert routers == {"gate"}


@pytest.mark.parametrize("family", ["phimoe", "llama4_text", "qwen3_moe", "mixtral"])
def test_router_with_an_adapter_still_chooses(family: str, tmp_path: Path) -> None:
    """Those of phimoe and llama4 inherit from `nn.Linear`, and return more than a product."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(twin_config(family), dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    router = "router.weight" if family in ("phimoe", "llama4_text") else "mlp.gate.weight"
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=[router], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    ids = torch.arange(12).view(2, 6)
    ours = meshlora.load(tmp_path / "model", adapter=tmp_path / "adapter", device="cpu", dtype="float32")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        found, expected = (m(input_ids=ids, attention_mask=torch.ones_like(ids)).logits for m in (ours, theirs))
    assert torch.allclose(found, expected, atol=1e-5), float((found - expected).abs().max())
