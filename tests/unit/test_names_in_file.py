"""Names in an adapter's file: PEFT loads each as that of the module it stands for, also where it renames them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

from meshlora.adapter.formats.file_tensors import factors_of_file, file_shapes
from meshlora.adapter.formats.peft_format import as_named_in
from meshlora.adapter.plan import AdapterPlan, plan_adapter
from meshlora.plan.derive import plan_model
from meshlora.wings.names import feature
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.model_class import model_class
from meshlora_ground.names_in_file import names_to_write
from meshlora_ground.topology import Topology
from meshlora_judge.adapter_files.verdict import judge_folder
from meshlora_judge.twin import twin_config
from tests.for_each import for_each

# Family -> options of LoRA, a module, and its name in the file.
RENAMED: dict[str, tuple[dict[str, Any], str, str]] = {
    "laguna": (
        {"target_modules": "all-linear"},
        "model.layers.1.mlp.shared_experts.up_proj",
        "model.layers.1.mlp.shared_expert.up_proj",
    ),
    "mistral_large4": (
        {"target_modules": ["o_proj", "up_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        "model.language_model.layers.1.mlp.experts",
        "model.language_model.layers.1.experts",
    ),
    "unlimited_ocr": (
        {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
        "model.language_model.embed_tokens",
        "model.embed_tokens",
    ),
}


def _model(family: str) -> Any:
    with torch.device("meta"):
        config = twin_config(family, tp=2)
        return model_class(config).from_config(config)


def _adapter(family: str, **options: Any) -> AdapterPlan:
    model = _model(family)
    return plan_adapter(model, plan_model(model, Topology.parse("tp=2,sp")), LoraConfig(r=2, **options))


def _lost(wrapped: Any, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """The factors of an adapter that PEFT does not find in a file with tensors of `shapes`."""
    tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    result = set_peft_model_state_dict(wrapped, tensors, low_cpu_mem_usage=True)
    return [key for key in (*result.missing_keys, *result.unexpected_keys) if ".lora_" in key]


@for_each("family", RENAMED)
def test_peft_loads_the_names_that_are_written_and_not_those_that_it_would_write(family: str) -> None:
    options, module, written = RENAMED[family]
    adapter = _adapter(family, **options)
    wrapped, shapes = get_peft_model(_model(family), adapter.stored), file_shapes(adapter.targets)
    assert any(target.in_file == (module, written) for target in adapter.targets.values())
    assert any(key.startswith(f"base_model.model.{written}.") for key in shapes)
    assert _lost(wrapped, shapes) == []
    own = {key: tuple(tensor.shape) for key, tensor in get_peft_model_state_dict(wrapped).items()}
    assert _lost(wrapped, own)


@for_each("family", ["llama", "qwen2_moe", "qwen3_vl", "deepseek_v3"])
def test_other_families_keep_their_names(family: str) -> None:
    adapter = _adapter(family, target_modules="all-linear")
    assert {target.in_file for target in adapter.targets.values()} == {("", "")}


def test_a_module_that_peft_finds_under_no_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.language_model.layers.1.self_attn.k_sconv.weight_proj"
    if name not in dict((model := _model("inkling2")).named_modules()):  # transformers 5.24 has it elsewhere
        name = name.replace("k_sconv", "k_proj.sconv")
    assert names_to_write(model, [name]) == {name: ""}
    monkeypatch.setattr(feature, "names_to_write", lambda model, modules: dict.fromkeys(modules, ""))
    with pytest.raises(UnsupportedError, match=r"LoRA on model.*no name.*exclude_modules: \[model"):
        _adapter("llama", target_modules=["q_proj"])


@for_each("family", RENAMED)
def test_factors_under_their_own_names_are_found(family: str, tmp_path: Path) -> None:
    """As an older meshlora wrote them, and PEFT, which then loses them."""
    options, _, _ = RENAMED[family]
    adapter = _adapter(family, **options)
    shapes = file_shapes({n: replace(target, in_file=("", "")) for n, target in adapter.targets.items()})
    file = tmp_path / "adapter_model.safetensors"
    save_file({key: torch.full(shape, 2.0) for key, shape in shapes.items()}, file)
    found = factors_of_file(load_file(file), as_named_in(file, adapter.targets), file)
    assert found.keys() == adapter.targets.keys()


@for_each("family", RENAMED)
def test_the_judge_finds_what_peft_would_lose_beside_its_base(family: str, tmp_path: Path) -> None:
    """Under the names of the modules no key is a stranger, and yet PEFT loads others."""
    options, module, _ = RENAMED[family]
    adapter, model = _adapter(family, **options), _model(family)
    model.config.save_pretrained(tmp_path / "base")
    shapes = file_shapes({n: replace(target, in_file=("", "")) for n, target in adapter.targets.items()})
    for name, of_file in (("written", file_shapes(adapter.targets)), ("own", shapes)):
        adapter.stored.save_pretrained(tmp_path / name)
        tensors = {key: torch.randn(shape) for key, shape in of_file.items()}
        save_file(tensors, tmp_path / name / "adapter_model.safetensors")
    assert judge_folder(tmp_path / "written", model=tmp_path / "base").is_sound
    found = judge_folder(tmp_path / "own", model=tmp_path / "base").wrong
    assert {"incomplete", "dropped"} & {finding.kind for finding in found}
    assert any(module in name for finding in found for name in finding.names)
