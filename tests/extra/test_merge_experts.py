"""`meshlora merge` of adapters on experts: checkpoints that store them one by one, and fused ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from meshlora.loading.blueprint import read_model_config
from meshlora_extra.merging.changes import merged_expert
from meshlora_extra.merging.merge import merge
from meshlora_ground.compat.peft_targets import targets_as_configured
from meshlora_ground.errors import MeshloraError, UnsupportedError
from meshlora_judge.twin import twin_config
from tests.peft_adapters import save_adapter, with_adapter
from tests.unit.test_expert_weights import FAMILIES, FILE, fuse, make_checkpoint

# family -> (targets among modules, targets among parameters).
BOTH = ["gate_up_proj", "down_proj"]
KINDS: dict[str, tuple[str, list[str], list[str]]] = {
    "qwen3_moe": ("qwen3_moe", [], BOTH),
    "with_attention": ("qwen3_moe", ["q_proj", "o_proj"], BOTH),
    "gate_up_alone": ("qwen3_moe", [], ["gate_up_proj"]),
    "down_alone": ("qwen3_moe", [], ["down_proj"]),
    "mixtral": ("mixtral", ["v_proj"], BOTH),
    "deepseek_v3": ("deepseek_v3", [], BOTH),
    "nemotron_h": ("nemotron_h", [], ["experts.up_proj", "experts.down_proj"]),
    "gpt_oss": ("gpt_oss", ["q_proj"], BOTH),
    "llama4_text": ("llama4_text", [], ["experts.gate_up_proj", "experts.down_proj"]),
    "granitemoe": ("granitemoe", [], BOTH),
    "a_matrix_and_experts": ("qwen3_moe", [], ["q_proj.weight", "down_proj"]),
}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )


def make_adapter(model: Path, folder: Path, modules: list[str], parameters: list[str], **lora: Any) -> Path:
    options = {"lora_alpha": 12, "target_modules": modules, "lora_dropout": 0.0, "target_parameters": parameters}
    return save_adapter(load(model), folder, **options | lora)


def merged_by_peft(model: Path, adapter: Path, out: Path) -> dict[str, Tensor]:
    with_adapter(load(model), adapter).merge_and_unload().save_pretrained(out)
    return load_file(out / FILE)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bytes_as_peft_writes(kind: str, tmp_path: Path) -> None:
    family, modules, parameters = KINDS[kind]
    config = make_checkpoint(tmp_path / "model", family)
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter", modules, parameters)
    done = merge(tmp_path / "model", adapter, tmp_path / "out", config=config)
    assert "relative difference" in done.check
    ours, theirs, before = (
        load_file(tmp_path / "out" / FILE),
        merged_by_peft(tmp_path / "model", adapter, tmp_path / "peft"),
        load_file(tmp_path / "model" / FILE),
    )
    assert ours.keys() == theirs.keys() == before.keys()
    changed = [key for key in ours if not torch.equal(ours[key], before[key])]
    assert len(changed) == done.num_changed > 0
    for key in ours:
        if "experts" in key:
            assert torch.equal(ours[key], theirs[key]), (key, (ours[key] - theirs[key]).abs().max())
        else:
            assert torch.allclose(ours[key], theirs[key], rtol=1e-6, atol=1e-6), key


def assert_merged_as_by_peft(folder: Path, family: str, **sizes: Any) -> None:
    config = make_checkpoint(folder / "model", family, **sizes)
    adapter = make_adapter(folder / "model", folder / "adapter", [], BOTH)
    merge(folder / "model", adapter, folder / "out", config=config, check_logits=False)
    ours, theirs = load_file(folder / "out" / FILE), merged_by_peft(folder / "model", adapter, folder / "peft")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_square_matrices_of_experts_are_merged_the_right_way_round(tmp_path: Path) -> None:
    """As in gpt-oss: hidden size and intermediate size are the same, and the shape does not tell which is which."""
    assert_merged_as_by_peft(tmp_path, "gpt_oss", intermediate_size=64)


def test_more_than_ten_experts_are_merged_in_their_order(tmp_path: Path) -> None:
    """As text 10 comes before 2."""
    assert_merged_as_by_peft(tmp_path, "qwen3_moe", num_experts=12)


@pytest.mark.parametrize("family", [family for family, is_apart in FAMILIES.items() if is_apart])
def test_fused_and_one_by_one_become_the_same_model(family: str, tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path / "model", family)
    parameters = ["experts.up_proj" if family == "nemotron_h" else "experts.gate_up_proj", "experts.down_proj"]
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter", [], parameters)
    merge(tmp_path / "model", adapter, tmp_path / "out", config=config, check_logits=False)
    fuse(tmp_path / "model")
    merge(tmp_path / "model", adapter, tmp_path / "fused", config=config, check_logits=False)
    assert load_file(tmp_path / "fused" / FILE).keys() == load_file(tmp_path / "model" / FILE).keys()
    one, two = (load(tmp_path / name).state_dict() for name in ("out", "fused"))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("is_fused", [False, True])
def test_half_precision_is_rounded_once(is_fused: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "wide", "qwen3_moe")
    model = tmp_path / "model"
    load(tmp_path / "wide", torch.bfloat16).save_pretrained(model)
    if is_fused:
        fuse(model, torch.bfloat16)
    adapter = make_adapter(model, tmp_path / "adapter", [], BOTH)
    merge(model, adapter, tmp_path / "out", config=read_model_config(model), check_logits=False)
    expected = merged_by_peft(model, adapter, tmp_path / "peft")  # in float32
    merged = load(tmp_path / "out", torch.bfloat16).state_dict()
    loaded = load(tmp_path / "peft", torch.float32).state_dict()
    assert any(t.dtype == torch.float32 for t in expected.values())
    for name in merged:
        if ".experts." in name:
            assert torch.equal(merged[name], loaded[name].bfloat16()), name


@pytest.mark.parametrize(
    "option", [{"use_rslora": True}, {"rank_pattern": {".*down_proj": 2}, "alpha_pattern": {".*down_proj": 3}}]
)
def test_ranks_and_scales_are_those_of_peft(option: dict[str, Any], tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path / "model", "qwen3_moe")
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter", [], BOTH, **option)
    merge(tmp_path / "model", adapter, tmp_path / "out", config=config)
    theirs = merged_by_peft(tmp_path / "model", adapter, tmp_path / "peft")
    ours = load_file(tmp_path / "out" / FILE)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_targets_are_those_of_the_configuration(tmp_path: Path) -> None:
    """PEFT alone would read `shared_experts.gate_proj` as a word for the routed experts."""
    config = make_checkpoint(tmp_path / "model", "deepseek_v3")
    with targets_as_configured():
        adapter = make_adapter(
            tmp_path / "model", tmp_path / "adapter", ["shared_experts.gate_proj", "o_proj"], ["experts.down_proj"]
        )
    merge(tmp_path / "model", adapter, tmp_path / "out", config=config)
    before, after = (load_file(tmp_path / name / FILE) for name in ("model", "out"))
    changed = {re.sub(r"\d+", "N", key) for key in before if not torch.equal(before[key], after[key])}
    assert changed == {
        "model.layers.N.mlp.experts.N.down_proj.weight",
        "model.layers.N.mlp.shared_experts.gate_proj.weight",
        "model.layers.N.self_attn.o_proj.weight",
    }


def test_experts_of_layers_that_the_model_has_not_are_kept(tmp_path: Path) -> None:
    """deepseek_v3 stores a layer for multi-token prediction; here one of which no two experts have the same."""
    config = make_checkpoint(tmp_path / "model", "deepseek_v3")
    tensors = load_file(tmp_path / "model" / FILE)
    extra = {
        f"model.layers.61.mlp.experts.{end}_proj.weight": torch.randn(32, 64) for end in ("0.gate", "1.gate", "1.up")
    }
    save_file(tensors | extra, tmp_path / "model" / FILE, metadata={"format": "pt"})
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter", [], BOTH)
    merge(tmp_path / "model", adapter, tmp_path / "out", config=config)
    merged = load_file(tmp_path / "out" / FILE)
    assert merged.keys() == tensors.keys() | extra.keys()
    assert all(torch.equal(merged[key], extra[key]) for key in extra)


def test_float64_is_compared_in_float64(tmp_path: Path) -> None:
    """Of the ways to run experts only one knows float64."""
    AutoModelForCausalLM.from_config(twin_config("qwen3_moe"), dtype=torch.float64).save_pretrained(tmp_path / "model")
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter", ["q_proj"], BOTH)
    done = merge(tmp_path / "model", adapter, tmp_path / "out", config=read_model_config(tmp_path / "model"))
    assert "relative difference" in done.check


def make_half(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(twin_config("gpt_oss"), dtype=torch.bfloat16).save_pretrained(folder / "model")
    return make_adapter(folder / "model", folder / "adapter", ["q_proj"], BOTH)


@pytest.mark.parametrize("seed", range(3))
def test_a_router_that_falls_the_other_way_once_rounded_is_no_fault(seed: int, tmp_path: Path) -> None:
    """With seed 0 one does: the logits are 22 % apart (torch 2.13)."""
    adapter = make_half(tmp_path, seed)
    merge(tmp_path / "model", adapter, tmp_path / "out", config=read_model_config(tmp_path / "model"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_lost_update_is_found_whatever_routers_do(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_half(tmp_path, 0)
    monkeypatch.setattr("meshlora_extra.merging.merge.merged_weight", lambda weight, *_: weight)
    with pytest.raises(MeshloraError, match="logits differ"):
        merge(
            tmp_path / "model",
            adapter,
            tmp_path / "out",
            config=read_model_config(tmp_path / "model"),
            dtype=getattr(torch, dtype),
        )
    assert not (tmp_path / "out").exists()


def test_an_update_of_another_expert_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_checkpoint(tmp_path / "model", "qwen3_moe")
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter", [], BOTH)

    def of_first(matrix: Tensor, place: tuple[Any, ...], *rest: Any) -> Tensor:
        return merged_expert(matrix, (0, *place[1:]), *rest)

    monkeypatch.setattr("meshlora_extra.merging.merge.merged_expert", of_first)
    with pytest.raises(MeshloraError, match="logits differ"):
        merge(tmp_path / "model", adapter, tmp_path / "out", config=config)


def cut_experts(folder: Path) -> None:
    file = folder / "adapter" / "adapter_model.safetensors"
    tensors = {key: t[:-4].clone() if "lora_A" in key else t[:, :-4].clone() for key, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def lose_expert(folder: Path) -> None:
    tensors = load_file(folder / "model" / FILE)
    del tensors["model.layers.1.mlp.experts.1.up_proj.weight"]
    save_file(tensors, folder / "model" / FILE, metadata={"format": "pt"})


def quantise_expert(folder: Path) -> None:
    tensors = load_file(folder / "model" / FILE)
    key = "model.layers.1.mlp.experts.1.up_proj.weight"
    save_file(tensors | {key: tensors[key].to(torch.int8)}, folder / "model" / FILE, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (cut_experts, ("adapter_model.safetensors", "shape", "another model")),
        (lose_expert, ("experts.1.up_proj.weight", "missing")),
        (quantise_expert, ("experts.1.up_proj.weight", "integers")),
    ],
)
def test_mistake_is_one_message_and_no_file(
    make: Callable[[Path], None], words: tuple[str, ...], tmp_path: Path
) -> None:
    config = make_checkpoint(tmp_path / "model", "qwen3_moe")
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter", [], BOTH)
    make(tmp_path)
    with pytest.raises(MeshloraError) as caught:
        merge(tmp_path / "model", adapter, tmp_path / "out", config=config)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_what_peft_takes_out_of_a_matrix_that_is_a_target_parameter_is_taken_out(init: str, tmp_path: Path) -> None:
    """The linears of dense layers of such models are stored so."""
    config = make_checkpoint(tmp_path / "model", "qwen3_moe")
    parameters = ["q_proj.weight", "mlp.gate.weight"]
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter", ["v_proj"], parameters, init_lora_weights=init)
    merge(tmp_path / "model", adapter, tmp_path / "out", config=config, check_logits=False)
    ours, theirs = load_file(tmp_path / "out" / FILE), merged_by_peft(tmp_path / "model", adapter, tmp_path / "peft")
    for key in ours:
        assert torch.allclose(ours[key], theirs[key], rtol=1e-5, atol=1e-5), key


def test_what_peft_would_take_out_of_a_stack_is_refused(tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path / "model", "qwen3_moe")
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter", [], BOTH)
    file = adapter / "adapter_config.json"
    file.write_text(file.read_text().replace('"init_lora_weights": true', '"init_lora_weights": "pissa"'))
    with pytest.raises(UnsupportedError, match="pissa"):
        merge(tmp_path / "model", adapter, tmp_path / "out", config=config, check_logits=False)
