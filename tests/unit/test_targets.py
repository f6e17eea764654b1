"""Targets are those that PEFT itself would choose, and what would not be followed is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from meshlora.adapter.targets import check_supported, resolve_targets
from meshlora.errors import UnsupportedError, UserError
from meshlora.plan.rules import plan_model
from meshlora.plan.topology import Topology
from meshlora.plan.twin import twin_config

CHOICES: dict[str, dict[str, Any]] = {
    "suffixes": {"target_modules": ["q_proj", "v_proj"]},
    "dotted suffix": {"target_modules": ["self_attn.o_proj"]},
    "regex": {"target_modules": r".*layers\.1\..*(gate|up)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "default of the family": {},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "excluded by regex": {"target_modules": "all-linear", "exclude_modules": r".*mlp.*"},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    "ranks": {
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"v_proj": 2, r"layers\.1\..*up_proj": 3},
    },
    "alphas": {
        "target_modules": ["q_proj", "v_proj"],
        "alpha_pattern": {"self_attn.q_proj": 32, r"layers.1.self_attn.v_proj": 5},
    },
    "rslora": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "rank_pattern": {"v_proj": 2}},
}


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5_text"])
@pytest.mark.parametrize("choice", CHOICES)
def test_targets_ranks_and_scales_are_those_of_peft(choice: str, family: str) -> None:
    if family == "qwen3_5_text" and choice in ("default of the family", "one layer", "layers", "alphas", "ranks"):
        family = "qwen3"  # the other has attention in its second layer only, which those choices do not name
    config = LoraConfig(r=4, lora_alpha=16, **CHOICES[choice])
    model = AutoModelForCausalLM.from_config(twin_config(family))
    with torch.device("meta"):
        ours_on = AutoModelForCausalLM.from_config(twin_config(family))
    ours = resolve_targets(ours_on, plan_model(ours_on, Topology()), config, strict=False)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, **CHOICES[choice]))
    theirs = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in peft.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert {name: (t.r, t.scaling) for name, t in ours.items()} == theirs


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("use_dora", True),
        ("lora_dropout", 0.1),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("init_lora_weights", "pissa"),
        ("fan_in_fan_out", True),
        ("layer_replication", [(0, 1)]),
        ("trainable_token_indices", [1]),
        ("lora_bias", True),
        ("task_type", "SEQ_CLS"),
    ],
)
def test_option_that_would_not_be_followed_is_refused_by_name(option: str, value: Any) -> None:
    config = LoraConfig(target_modules=["q_proj"])
    setattr(config, option, value)
    with pytest.raises(UnsupportedError, match=option):
        check_supported(config)


def test_config_of_the_caller_is_not_changed() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(twin_config("llama"))
    config = LoraConfig(target_modules="all-linear")
    before = config.to_dict()
    resolve_targets(model, plan_model(model, Topology()), config)
    assert config.to_dict() == before
    assert config.target_modules == "all-linear"


def test_bare_and_dotted_suffix_differ() -> None:
    """`mlp.c_proj` is not bare `c_proj`, which in other families hits attention and MLP."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(twin_config("starcoder2"))
    plan = plan_model(model, Topology())
    dotted = resolve_targets(model, plan, LoraConfig(target_modules=["mlp.c_proj"]))
    assert all(name.endswith("mlp.c_proj") for name in dotted)
    with pytest.raises(UserError, match="matches no linear"):
        resolve_targets(model, plan, LoraConfig(target_modules=["self_attn.c_proj"]))
