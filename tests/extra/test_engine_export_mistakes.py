"""Adapter folders with one pair of factors for each expert: what is refused, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from meshlora.adapter.formats.peft_format import read_config
from meshlora.adapter.plan import plan_adapter
from meshlora.cli.main import main
from meshlora_extra.engine_export import export_per_expert, import_per_expert
from meshlora_extra.engines import served
from meshlora_extra.merging.changes import read_changes
from meshlora_extra.rl.publishing import publish
from meshlora_ground.errors import MeshloraError, UnsupportedError, UserError
from tests.extra.test_merge import one_error
from tests.for_each import for_each
from tests.unit.engine_adapters import BOTH, HIDDEN, KINDS, WEIGHTS, E, R, change, make_adapter, meta, same_tensors
from tests.unit.test_expert_format import OWN, SIZES


@pytest.mark.parametrize(
    "lora",
    [
        {"alpha_pattern": {"q_proj": 7}},
        {"rank_pattern": {".*down_proj": 2}},
        {"use_rslora": True, "rank_pattern": {".*down_proj": 2}, "alpha_pattern": {".*down_proj": 4}},
    ],
)
def test_engines_know_one_scale(lora: dict[str, Any], models: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = make_adapter("qwen3_moe", tmp_path / "adapter", target_modules=["q_proj"], target_parameters=BOTH, **lora)
    with pytest.raises(UserError, match=r"is scaled by .*one lora_alpha and one r.*meshlora merge"):
        export_per_expert(adapter, tmp_path / "out", **meta(models("qwen3_moe")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "lora", "words"),
    [
        ("gpt_oss", {"target_parameters": BOTH}, "in PEFT's form; serve the adapter as it is"),
        ("granitemoe", {"target_parameters": BOTH}, "not known what serving engines call its projections"),
        ("llama", {"target_modules": ["q_proj"]}, "has no routed experts"),
        ("qwen3_moe", {"target_modules": ["q_proj"]}, "it is on no experts"),
        ("phimoe", {"target_parameters": ["router.weight", *BOTH]}, "LoRA on the router model.layers.0.mlp.rout"),
        ("phimoe", {"target_modules": ["router"], "target_parameters": BOTH}, "LoRA on PhimoeTopKRouter is not supp"),
        (
            "qwen3_moe",
            {"target_parameters": BOTH, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            "modules_to_save",
        ),
    ],
)
def test_what_engines_do_not_read_so_is_refused(
    family: str, lora: dict[str, Any], words: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = make_adapter(family, tmp_path / "adapter", **lora)
    with pytest.raises(UserError, match=words):
        export_per_expert(adapter, tmp_path / "out", **meta(models(family)))
    assert not (tmp_path / "out").exists()


FUSED = [
    ({"target_parameters": BOTH[:1]}, "it is on model.layers.0.mlp.experts.gate_up_proj alone, and engines need both"),
    ({"target_parameters": BOTH[1:]}, "it is on model.layers.0.mlp.experts.down_proj alone, and engines need both"),
    ({"alpha_pattern": {"q_proj": 7}}, "is scaled by .*engines know one lora_alpha"),
    ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 4}}, "has rank 2, .* 3, and engines read one"),
    ({"bias": "all"}, "bias='all': adapters for serving engines are LoRA and nothing more"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
]


@pytest.mark.parametrize(("lora", "words"), FUSED)
def test_what_engines_compute_otherwise_is_not_served_as_it_is(
    lora: dict[str, Any], words: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Neither published, nor is it said so."""
    base = {"target_modules": ["q_proj"], "target_parameters": BOTH, "lora_alpha": 2 * R}
    adapter = make_adapter("gpt_oss", tmp_path / "adapter", **base | lora)
    found = meta(models("gpt_oss"))
    with pytest.raises(UserError, match=words):
        publish(adapter, tmp_path / "to", name="a", model_and_plan=lambda: (found["model"], found["plan"]))
    assert not list((tmp_path / "to").glob("*")) or not (tmp_path / "to").exists()
    with pytest.raises(UserError, match=words):
        export_per_expert(adapter, tmp_path / "out", **found)


def test_experts_that_engines_read_as_peft_has_them_are_published_so(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = make_adapter("gpt_oss", tmp_path / "adapter", target_modules=["q_proj"], target_parameters=BOTH)
    found = meta(models("gpt_oss"))
    version = publish(adapter, tmp_path / "to", name="a", model_and_plan=lambda: (found["model"], found["plan"]))
    assert same_tensors(version, adapter)
    of_text = dataclasses.replace(found["plan"], model_type="qwen3_5_moe_text")
    with pytest.raises(UnsupportedError, match="engines apply it to 'qwen3_5_moe' alone, the class with images"):
        publish(adapter, tmp_path / "to", name="b", model_and_plan=lambda: (found["model"], of_text))
    name, rule = next(iter(found["plan"].experts.items()))
    swapped = dataclasses.replace(rule, first=dataclasses.replace(rule.first, is_swapped=True))
    planned = plan_adapter(found["model"], found["plan"], read_config(adapter, ignore_dropout=True))
    with pytest.raises(UnsupportedError, match="on the side of the output"):
        served(planned, dataclasses.replace(found["plan"], experts={name: swapped}), "it")


@pytest.mark.parametrize(
    "option",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
        {"trainable_token_indices": [3]},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_that_engines_do_not_have_are_refused(
    option: dict[str, Any], models: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = KINDS["qwen3_moe"][1](tmp_path / "adapter")
    change(adapter, load_file(adapter / WEIGHTS), **option)
    with pytest.raises(UnsupportedError, match=next(iter(option))):
        export_per_expert(adapter, tmp_path / "out", **meta(models("qwen3_moe")))


def test_embedding_that_was_resized_is_refused_for_engines(models: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = KINDS["qwen3_moe"][1](tmp_path / "adapter")
    change(adapter, load_file(adapter / WEIGHTS) | {"base_model.model.model.embed_tokens.weight": torch.ones(4, 4)})
    with pytest.raises(UnsupportedError, match=r"embed_tokens.weight: it is a weight of the base.*meshlora merge"):
        export_per_expert(adapter, tmp_path / "out", **meta(models("qwen3_moe")))


def expert_key(name: str, layer: int = 1, e: int = 2) -> str:
    return f"base_model.model.model.layers.{layer}.mlp.experts.{e}.{name}.weight"


Q_KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "a_hole": (
        lambda t: t.pop(expert_key("up_proj.lora_B")),
        "lacks 1 of 4 experts' factors, first .*2.up_proj.lora_B",
    ),
    "nan": (lambda t: t[expert_key("gate_proj.lora_A")].fill_(math.nan), "experts.2.gate_proj.lora_A.*not finite"),
    "integers": (
        lambda t: t.update({expert_key("gate_proj.lora_A"): torch.ones(R, HIDDEN, dtype=torch.int64)}),
        "its type is I64",
    ),
    "another_rank": (
        lambda t: t.update({k: t[k][:2] if "lora_A" in k else t[k][:, :2] for k in t if ".experts." in k}),
        r"down_proj: its shape is \[2, 24\].* need \[3, 24\].*another rank",
    ),
    "one_expert_more": (
        lambda t: t.update({expert_key("up_proj.lora_A", e=E): t[expert_key("up_proj.lora_A")].clone()}),
        "experts.4.*has 4 experts with gate_proj, up_proj, down_proj",
    ),
    "half_an_attention": (
        lambda t: t.pop(Q_KEY.format("B")),
        "q_proj.lora_B.weight: its lora_A and lora_B are not both",
    ),
    "a_wide_attention": (
        lambda t: t.update({Q_KEY.format("A"): torch.ones(R, HIDDEN + 1, dtype=torch.float64)}),
        r"q_proj.lora_A.weight: its shape is \[3, 33\]",
    ),
    "an_unknown_key": (
        lambda t: t.update({"base_model.model.x.lora_A.weight": torch.ones(1)}),
        "no place in this model",
    ),
    "several_types": (
        lambda t: t.update({k: t[k].float() for k in t if ".experts." in k and "gate_proj" in k}),
        "have several types",
    ),
}


@for_each("damage", DAMAGES)
def test_damaged_files_are_refused(damage: str, engine: Path, models: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    tensors = load_file(engine / WEIGHTS)
    DAMAGES[damage][0](tensors)
    change(tmp_path / "engine", tensors)
    with pytest.raises(UserError, match=DAMAGES[damage][1]):
        import_per_expert(tmp_path / "engine", tmp_path / "out", **meta(models("qwen3_moe")))
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]


def test_cut_files_are_refused(engine: Path, models: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    (tmp_path / "engine" / WEIGHTS).write_bytes((engine / WEIGHTS).read_bytes()[:-40])
    with pytest.raises(UserError, match="damaged"):
        import_per_expert(tmp_path / "engine", tmp_path / "out", **meta(models("qwen3_moe")))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"down_proj": 2}}, r"rank_pattern=.*experts.0.down_proj"),
        ({"alpha_pattern": {"experts.gate_up_proj": 2}}, r"alpha_pattern=.*experts.gate_up_proj"),
        ({"alpha_pattern": {r"experts\.1\..*": 32}}, r"alpha_pattern=.*experts.1.gate_proj"),
    ],
)
def test_configurations_that_say_more_than_the_file_are_refused(
    option: dict[str, Any], words: str, engine: Path, models: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    change(tmp_path / "engine", load_file(engine / WEIGHTS), **option)
    with pytest.raises(UnsupportedError, match=words):
        import_per_expert(tmp_path / "engine", tmp_path / "out", **meta(models("qwen3_moe")))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_experts": 8}, "lacks 4 of 8 experts' factors"),
        ({"num_experts": 2}, "has 2 experts"),
        ({"hidden_size": 64}, "belongs to another model"),
        ({"num_hidden_layers": 1}, "no place in this model"),
    ],
)
def test_the_wrong_model_is_refused(sizes: dict[str, int], words: str, engine: Path, tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3_moe", **{**SIZES, **OWN["qwen3_moe"], **sizes}).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=words):
        import_per_expert(engine, tmp_path / "out", **meta(tmp_path / "model"))
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_the_wrong_model_is_refused(tmp_path: Path) -> None:
    adapter = KINDS["qwen3_moe"][1](tmp_path / "adapter")
    AutoConfig.for_model("qwen3_moe", **{**SIZES, **OWN["qwen3_moe"], "num_experts": 6}).save_pretrained(
        tmp_path / "model"
    )
    with pytest.raises(UserError, match="it belongs to another model"):
        export_per_expert(adapter, tmp_path / "out", **meta(tmp_path / "model"))


def test_folder_that_reads_back_differently_is_not_left(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, model = KINDS["qwen3_moe"][1](tmp_path / "adapter"), meta(models("qwen3_moe"))
    export_per_expert(adapter, tmp_path / "engine", **model)

    def lossy(tensors: dict[str, Tensor], *arguments: Any, **options: Any) -> None:
        save_file({key: tensor.half().double() for key, tensor in tensors.items()}, *arguments, **options)

    monkeypatch.setattr("meshlora.adapter.formats.peft_format.save_file", lossy)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MeshloraError, match="read back"):
        export_per_expert(adapter, tmp_path / "out", **model)
    with pytest.raises(MeshloraError, match="read back"):
        import_per_expert(tmp_path / "engine", tmp_path / "out", **model)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_and_its_mistakes(
    models: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, other = str(models("qwen3_moe")), str(models("llama"))
    adapter, engine, new = (str(tmp_path / name) for name in ("adapter", "engine", "new"))
    KINDS["qwen3_moe"][1](Path(adapter))
    line = [adapter, "--layout", "per-expert"]
    assert main(["export", *line, "--model", model, "--out", engine]) == 0
    assert f"exported and read back: {engine} (rank 3: 56 tensors)" in capfd.readouterr().out
    back = ["export", engine, "--layout", "peft", "--model", model, "--out", str(tmp_path / "back")]
    assert main(back) == 0
    assert same_tensors(tmp_path / "back", Path(adapter))
    file = tmp_path / "file.safetensors"
    save_file({"x.lora_A": torch.zeros(1, 1)}, file)
    cases: list[tuple[list[str], tuple[str, ...]]] = [
        ([*line, "--out", new], ("--layout per-expert", "--model FOLDER")),
        ([*line, "--out", engine, "--model", model], ("there already",)),
        ([*line, "--out", new, "--model", str(tmp_path / "nowhere")], ("nowhere", "no such folder")),
        ([*line, "--out", new, "--model", other], ("'llama'", "no routed experts")),
        ([str(tmp_path / "nowhere"), *line[1:], "--out", new, "--model", model], ("nowhere", "no such folder")),
        ([engine, *line[1:], "--out", new, "--model", model], ("already", "serve it as it is")),
        ([engine, "--layout", "peft", "--out", new], ("single experts", "--layout peft --model FOLDER")),
        ([engine, "--layout", "loralib", "--out", f"{new}.safetensors"], ("single experts", "--layout peft --model")),
        ([adapter, "--layout", "peft", "--out", new, "--model", model], ("PEFT's form", "leave out --model")),
        ([adapter, "--layout", "loralib", "--out", new, "--model", model], ("leave out --model",)),
        ([str(file), "--layout", "per-expert", "--out", new, "--model", model], ("--layout peft",)),
        ([*line, "--out", new, "--model", model, "--lora-alpha", "3"], ("--lora-alpha", "leave out")),
    ]
    capfd.readouterr()
    for words_of_line, words in cases:
        before = sorted(tmp_path.rglob("*"))
        assert main(["export", *words_of_line]) == 2, words_of_line
        message = one_error(*capfd.readouterr())
        assert not [word for word in words if word not in message], message
        assert sorted(tmp_path.rglob("*")) == before


def test_merge_says_the_way_from_single_experts(engine: Path, models: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match=r"single experts.*export it with --layout peft --model FOLDER"):
        read_changes(meta(models("qwen3_moe"))["model"], engine)
