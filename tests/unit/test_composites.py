"""Composites: the text part is found and split, everything beside it is whole, adapters are on the text part."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from meshlora.adapter.formats.peft_format import lora_config
from meshlora.adapter.plan import plan_adapter
from meshlora.loading.blueprint import Blueprint, read_model_config
from meshlora.model.stored import Part
from meshlora.model.weights import CheckpointSource
from meshlora.plan.derive import decoder_layers, plan_model
from meshlora.plan.layout import Split
from meshlora.plan.rules import Domain
from meshlora.run.run_data import check_vision
from meshlora.train.losses import packed_positions
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.model_class import model_class
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config

SP = Topology.parse("tp=2,sp")
# Family -> (its decoder layers, modules beside the text part).
FAMILIES = {
    "gemma3": ("model.language_model.layers", ("model.vision_tower", "model.multi_modal_projector")),
    "llama4": ("language_model.model.layers", ("vision_model", "multi_modal_projector")),
    "mistral3": ("model.language_model.layers", ("model.vision_tower", "model.multi_modal_projector")),
    "qwen2_5_vl": ("model.language_model.layers", ("model.visual",)),
    "qwen3_vl": ("model.language_model.layers", ("model.visual",)),
    "idefics3": ("model.text_model.layers", ("model.vision_model", "model.connector")),
    "voxtral": ("model.language_model.layers", ("model.audio_tower", "model.multi_modal_projector")),
}


def _model(family: str) -> Any:
    config = twin_config(family, tp=2)
    with torch.device("meta"):
        return model_class(config).from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_text_part_is_split_and_what_is_beside_it_is_alike_on_every_rank(family: str) -> None:
    model, (layers, beside) = _model(family), FAMILIES[family]
    plan = plan_model(model, SP)
    assert decoder_layers(model)[0] == plan.layers == layers
    assert all(region.name.startswith(f"{layers}.") for region in plan.regions)
    assert {rule.split for name, rule in plan.linears.items() if name.startswith(layers)} >= {Split.COLUMN, Split.ROW}
    outside = [name for name in plan.linears if not plan.is_text(name)]
    assert all(name.startswith(beside) for name in outside)
    assert {plan.linears[name].split for name in outside} == {Split.WHOLE}
    # Their results enter the stream before it is cut over tp, so that the gradient is that of all tokens on each rank.
    assert {plan.linears[name].domain for name in outside} == {Domain.EQUAL}
    assert not any(name.startswith(beside) for name in plan.after)


def _peft_targets(family: str, config: LoraConfig) -> set[str]:
    peft = get_peft_model(_model(family), config)
    modules = (name for name, module in peft.named_modules() if isinstance(module, LoraLayer))
    return {name.removeprefix("base_model.model.") for name in modules}


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
@pytest.mark.parametrize("given", ["all-linear", ["q_proj", "v_proj"], r".*\.(q_proj|fc1)"])
def test_an_adapter_is_on_the_text_part_and_its_file_says_so_to_peft(family: str, given: Any) -> None:
    model = _model(family)
    adapter = plan_adapter(model, plan_model(model, SP), LoraConfig(r=2, target_modules=given))
    assert adapter.targets
    assert all(name.startswith("model.language_model.") for name in adapter.targets)
    assert _peft_targets(family, adapter.stored) == set(adapter.targets)


@pytest.mark.parametrize(
    ("vision", "start"),
    [(True, ("model.vision_tower", "model.multi_modal_projector")), (["encoder"], ("model.vision_tower.encoder",))],
)
def test_vision_opens_the_tower(vision: Any, start: tuple[str, ...]) -> None:
    model = _model("gemma3")
    config = lora_config({"r": 2, "target_modules": "all-linear", "vision": vision}, "lora", unknown_is_error=True)
    plan = plan_model(model, SP)
    adapter = plan_adapter(model, plan, config)
    outside = {name for name in adapter.targets if not plan.is_text(name)}
    assert outside
    assert all(name.startswith(start) for name in outside)
    assert any(plan.is_text(name) for name in adapter.targets)
    rule = adapter.parameters[f"{min(outside)}.lora_A"].rule
    assert rule == adapter.parameters[f"{min(outside)}.lora_B"].rule
    assert _peft_targets("gemma3", adapter.stored) == set(adapter.targets)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": ["fc1"]}, "fc1.* matches no linear layer"),
        ({"target_modules": r".*vision_tower.*fc1"}, "it matches no linear layer of the text part"),
        ({"target_modules": ["q_proj"], "bias": "all"}, "bias='all' with a composite"),
        ({"target_modules": ["q_proj"], "vision": "yes"}, "true, false or a list of names"),
    ],
)
def test_targets_outside_the_text_part_are_refused(options: dict[str, Any], words: str) -> None:
    model = _model("gemma3")
    with pytest.raises((UserError, UnsupportedError), match=words):
        plan_adapter(model, plan_model(model, SP), lora_config(options, "lora", unknown_is_error=True))


def test_a_run_on_text_refuses_an_adapter_on_the_tower() -> None:
    model = _model("gemma3")
    config = lora_config({"r": 2, "target_modules": "all-linear", "vision": True}, "lora")
    plan = plan_model(model, SP)
    options = {"source": None, "options": None, "config": model.config, "dtype": torch.float64, "model": model}
    blueprint = Blueprint(**options, plan=plan, adapter=plan_adapter(model, plan, config))
    with pytest.raises(UserError, match=r"model\.vision_tower.*text does not pass through it.*leave out lora\.vision"):
        check_vision(blueprint, None)
    text = dataclasses.replace(blueprint, adapter=plan_adapter(model, plan, LoraConfig(target_modules="all-linear")))
    check_vision(text, None)


def test_packed_positions_of_m_rope_keep_sequences_apart() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert torch.equal(packed_positions(twin_config("llama"), positions), positions)
    four = packed_positions(twin_config("qwen2_5_vl"), positions)
    assert four.shape == (4, 1, 5)
    assert torch.equal(four[0], positions)


def test_experts_that_are_stored_transposed_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    config = twin_config("qwen3_vl_moe", tp=2)
    config.text_config.moe_intermediate_size = 24  # no square matrix, whose transpose nobody would notice
    cls = model_class(config)
    cls.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = cls.from_config(config)
    source = CheckpointSource(tmp_path, model)
    whole = cls.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    names = [name for name in whole if ".experts." in name]
    assert {Path(name).suffix for name in names} == {".gate_up_proj", ".down_proj"}
    for name in names:
        assert source.mistake(name, tuple(whole[name].shape)) is None
        assert torch.equal(source.read(name), whole[name])
        part = source.read(name, Part(0, 2, 5), Part(1, 3, 8), Part(2, 0, 2), Part(2, 7, 9))
        assert torch.equal(part, whole[name][2:5, 3:8][..., [0, 1, 7, 8]])


@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_of_a_folder_is_read(family: str, tmp_path: Path) -> None:
    """Whatever its parts say, or do not, of tied weights; its dtype is that of the text part if it has none itself."""
    twin_config(family).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text())
    stored["dtype"] = None
    stored["text_config"]["dtype"] = "bfloat16"
    file.write_text(json.dumps(stored))
    config = read_model_config(tmp_path)
    assert (config.model_type, config.dtype) == (family, torch.bfloat16)
