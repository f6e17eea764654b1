"""Configurations of which one part would be dropped in silence, or that PEFT would not read: refused, or followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig
from transformers import GPT2Config

import meshlora
from meshlora.adapter.formats.peft_format import lora_config
from meshlora.adapter.plan import final_config
from meshlora.adapter.targets.resolve import Target, resolve_targets
from meshlora.wings.experts.targets import out_of_reach
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.blueprints import build_meta
from tests.for_each import for_each
from tests.twins import make_twin

PARTS = ["experts.gate_proj", "experts.up_proj"]


def _targets(config: Any, **options: Any) -> dict[str, Target]:
    model, plan = build_meta(config, Topology(), dtype=torch.float32, disable_dropout=True)
    return resolve_targets(model, plan, LoraConfig(**{"r": 8, "lora_alpha": 16, **options}))


def _experts(family: str = "gpt_oss", **options: Any) -> dict[str, Target]:
    return _targets(twin_config(family), **options)


@pytest.mark.parametrize(
    "given",
    [
        ["gate_up_proj", "experts.gate_proj"],
        ["experts.up_proj", "mlp.experts.gate_up_proj"],
        ["layers.1.mlp.experts.gate_up_proj", *PARTS],
    ],
)
def test_whole_and_part_of_one_projection_are_refused_however_they_are_named(given: list[str]) -> None:
    with pytest.raises(UserError, match=r"gate_up_proj and its parts are both named"):
        _experts(target_parameters=given)


def test_whole_in_one_layer_and_parts_in_the_other() -> None:
    given = ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.gate_proj"]
    assert [target.pieces for target in _experts(target_parameters=given).values()] == [(), ("gate",)]


@for_each("option", ["rank_pattern", "alpha_pattern"])
@for_each(
    "pattern",
    [
        {r".*layers\.1\..*": 4},
        {"layers.1.mlp.experts.gate_proj": 4, "layers.1.mlp.experts.up_proj": 4},
        {"layers.1.mlp.experts.gate_up_proj": 4},
        {"gate_up_proj": 4},
        {r".*layers\.1\..*": 4, r"experts\.(gate|up)_proj": 2},
    ],
)
def test_pattern_for_some_of_the_parts_is_refused(option: str, pattern: dict[str, int]) -> None:
    """As the rank of both pieces together it would be half of what was asked for."""
    with pytest.raises(UserError, match=rf"{option}.*give the pattern for experts\.gate"):
        _experts(target_parameters=PARTS, **{option: pattern})


def test_pattern_for_linears_and_parts_of_their_name_is_refused() -> None:
    """The linears would have it, and the experts, who are asked for too, would not."""
    options: dict[str, Any] = {"target_modules": ["gate_proj"], "target_parameters": ["experts.gate_proj"]}
    with pytest.raises(UserError, match=r"is about gate_proj of model\.layers\.1\.mlp\.experts"):
        _experts("qwen3_moe", **options, rank_pattern={r".*\.\d\..*gate_proj": 4})


@pytest.mark.parametrize("key", [".*", r".*experts.*", r".*_proj"])
def test_pattern_for_parts_and_more_holds_for_each(key: str) -> None:
    model, plan = build_meta(twin_config("gpt_oss"), Topology(), dtype=torch.float32, disable_dropout=True)
    config = LoraConfig(r=8, lora_alpha=16, target_parameters=[*PARTS, "experts.down_proj"], rank_pattern={key: 4})
    targets = resolve_targets(model, plan, config)
    assert resolve_targets(model, plan, final_config(config, targets, plan)) == targets
    assert {(t.r, t.scaling, t.pieces) for t in targets.values()} == {(4, 4, ("gate", "up")), (4, 4, ())}


def test_one_pattern_for_parts_that_are_named_by_layer() -> None:
    given = [f"layers.{layer}.mlp.experts.up_proj" for layer in (0, 1)]
    targets = _experts(target_parameters=given, rank_pattern={"up_proj": 2})
    assert [(t.r, t.scaling, t.pieces) for t in targets.values()] == [(2, 8, ("up",))] * 2


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (r".*\.(q_proj|down_proj)", {"model.layers.0.self_attn.q_proj"}),
        (["q_proj", "down_proj"], {"q_proj"}),
        (["layers.0.self_attn.q_proj", "proj"], {"layers.0.self_attn.q_proj", "proj"}),
    ],
)
def test_linears_that_peft_leaves_stay_targets_beside_those_it_would_read_as_experts(
    given: str | list[str], left: set[str]
) -> None:
    kept, reached = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    found = out_of_reach(LoraConfig(target_modules=given), [kept, reached], "qwen3_moe")
    assert found.target_parameters == [f"{reached}.weight"]
    assert found.target_modules == left


def test_the_first_pattern_that_matches_the_parts_counts() -> None:
    patterns = {r"experts\.(gate|up)_proj": 2, r".*layers\.1\..*": 4}
    targets = _experts(target_parameters=[*PARTS, "experts.down_proj"], rank_pattern=patterns)
    assert [(t.r, t.pieces) for t in targets.values()] == [(2, ("gate", "up")), (8, ()), (2, ("gate", "up")), (4, ())]


@pytest.mark.parametrize("option", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("key", [".*attn.*", r"h\.1\.attn\.c_attn"])
def test_pattern_before_that_of_pieces_is_refused(option: str, key: str) -> None:
    model, plan = build_meta(
        GPT2Config(n_embd=64, n_layer=2, n_head=4), Topology(), dtype=torch.float32, disable_dropout=True
    )
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "pieces": {"c_attn": ["q", "v"]}}

    def resolve(pattern: dict[str, int]) -> dict[str, Target]:
        return resolve_targets(model, plan, lora_config({**given, option: pattern}, "lora", unknown_is_error=True))

    with pytest.raises(UserError, match=rf"{option}: .*adapters on pieces, by 'c_attn'"):
        resolve({key: 2})
    expected = {(2, 4)} if option == "rank_pattern" else {(4, 0.5)}
    assert {(target.r, target.scaling) for target in resolve({"c_attn": 2}).values()} == expected


@pytest.mark.parametrize("modules", [None, ["q_proj"], ["k_proj"]])
def test_dora_on_a_linear_that_is_named_as_a_parameter_is_refused(modules: list[str] | None) -> None:
    """PEFT wraps a parameter, and has no DoRA for that."""
    options: dict[str, Any] = {"target_modules": modules, "target_parameters": ["q_proj.weight"]}
    with pytest.raises(
        UnsupportedError,
        match=r"use_dora with target_parameters: model\.layers\.0\.self_attn\.q_proj.*in target_modules",
    ):
        _experts("qwen3_moe", **options, use_dora=True)
    assert _experts("qwen3_moe", target_parameters=["q_proj.weight"])


def test_a_start_of_a_linear_that_peft_takes_for_experts_is_refused_by_what_was_given() -> None:
    """Its file names it in target_parameters, which nobody gave, and could not be read again."""
    config = twin_config("qwen3_moe")
    assert config.mlp_only_layers
    words = r"init_lora_weights='orthogonal' with an adapter on model\.layers\.0\.mlp\.\w+: .* a word for experts"
    with pytest.raises(UnsupportedError, match=words):
        _targets(config, target_modules="all-linear", init_lora_weights="orthogonal")
    assert _targets(config, target_modules=["q_proj"], init_lora_weights="orthogonal")


def test_lora_bias_on_experts_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="lora_bias with an adapter on model"):
        _experts(target_modules=["q_proj"], target_parameters=["experts.down_proj"], lora_bias=True)


def test_transposed_linear_that_is_named_as_a_parameter_is_refused() -> None:
    """Its fan_in_fan_out=True PEFT refuses for a parameter."""
    config = GPT2Config(n_embd=64, n_layer=1, n_head=4)
    with pytest.raises(UnsupportedError, match=r"c_attn, which is stored \[in, out\].*in target_modules"):
        _targets(config, target_parameters=["c_attn.weight"])
    assert _targets(config, target_modules=["c_attn"])


def test_a_linear_that_is_named_as_a_parameter_is_stored_as_that_alone() -> None:
    """Where modules are stored by full names, as `v_proj` is in the tower too."""
    model, plan = build_meta(twin_config("gemma3"), Topology(), dtype=torch.float32, disable_dropout=True)
    name = "language_model.layers.0.self_attn.q_proj.weight"
    config = LoraConfig(target_modules=["v_proj"], target_parameters=[name])
    stored = final_config(config, resolve_targets(model, plan, config), plan)
    assert stored.target_parameters == [name]
    assert stored.target_modules
    assert all(module.endswith("v_proj") for module in stored.target_modules)


@pytest.mark.parametrize("lora", [{"r": 4}, AdaLoraConfig(total_step=9), "lora"])
def test_an_adapter_that_is_no_lora_config_is_said_by_its_type(lora: Any) -> None:
    with pytest.raises(UserError, match=f"an adapter by {type(lora).__name__}: adapters are those of peft.LoraConfig"):
        meshlora.load(twin_config("llama"), lora=lora)


@pytest.mark.parametrize("modules", [["q_proj"], "all-linear", ".*q_proj"])
def test_a_linear_that_is_named_twice_would_be_a_file_that_peft_refuses(modules: Any) -> None:
    lora = LoraConfig(target_modules=modules, target_parameters=["q_proj.weight"])
    with pytest.raises(UserError, match=r"both name model\.layers\.0\.self_attn\.q_proj"):
        meshlora.load(twin_config("llama"), lora=lora)


def test_a_folder_with_a_linear_named_twice_is_refused(tmp_path: Path) -> None:
    make_twin(tmp_path, "llama")
    config = tmp_path / "adapter/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_parameters": ["q_proj.weight"]}))
    with pytest.raises(UserError, match="both name"):
        meshlora.load(tmp_path / "model", adapter=tmp_path / "adapter")
