"""Adapter folders with one pair of factors for each expert: what serving engines read, and the way back."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshlora_extra.engine_export import Exported, export_per_expert, import_per_expert
from tests.for_each import for_each
from tests.unit.engine_adapters import (
    BOTH,
    CONFIG,
    HIDDEN,
    INNER,
    KINDS,
    WEIGHTS,
    E,
    R,
    change,
    make_adapter,
    meta,
    peft_logits,
    same_tensors,
    twin,
)
from tests.unit.test_expert_format import assert_same_model, logits_of

# As a user of vLLM reads them, for one layer and one expert; what is around comes from the tests.
QWEN_KEYS = {
    "mlp.experts.{e}.gate_proj.lora_A.weight": (R, HIDDEN),
    "mlp.experts.{e}.gate_proj.lora_B.weight": (INNER, R),
    "mlp.experts.{e}.up_proj.lora_A.weight": (R, HIDDEN),
    "mlp.experts.{e}.up_proj.lora_B.weight": (INNER, R),
    "mlp.experts.{e}.down_proj.lora_A.weight": (R, INNER),
    "mlp.experts.{e}.down_proj.lora_B.weight": (HIDDEN, R),
}
MIXTRAL_KEYS = {
    "block_sparse_moe.experts.{e}.w1.lora_A.weight": (R, HIDDEN),
    "block_sparse_moe.experts.{e}.w1.lora_B.weight": (INNER, R),
    "block_sparse_moe.experts.{e}.w3.lora_A.weight": (R, HIDDEN),
    "block_sparse_moe.experts.{e}.w3.lora_B.weight": (INNER, R),
    "block_sparse_moe.experts.{e}.w2.lora_A.weight": (R, INNER),
    "block_sparse_moe.experts.{e}.w2.lora_B.weight": (HIDDEN, R),
}


@pytest.mark.parametrize(
    ("kind", "of_experts", "of_attention", "modules"),
    [
        (
            "qwen3_moe",
            QWEN_KEYS,
            {
                "self_attn.q_proj.lora_A.weight": (R, HIDDEN),
                "self_attn.q_proj.lora_B.weight": (4 * 8, R),
                "self_attn.o_proj.lora_A.weight": (R, 4 * 8),
                "self_attn.o_proj.lora_B.weight": (HIDDEN, R),
            },
            ["down_proj", "gate_proj", "o_proj", "q_proj", "up_proj"],
        ),
        (
            "mixtral",
            MIXTRAL_KEYS,
            {"self_attn.v_proj.lora_A.weight": (R, HIDDEN), "self_attn.v_proj.lora_B.weight": (2 * 8, R)},
            ["v_proj", "w1", "w2", "w3"],
        ),
    ],
)
def test_keys_and_shapes_are_those_that_vllm_reads(
    kind: str,
    of_experts: dict[str, tuple[int, int]],
    of_attention: dict[str, tuple[int, int]],
    modules: list[str],
    models: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    family, make = KINDS[kind]
    adapter = make(tmp_path / "adapter")
    done = export_per_expert(adapter, tmp_path / "out", **meta(models(family)))
    start = "base_model.model.model.layers"
    expected = {
        f"{start}.{layer}.{key.format(e=e)}": shape
        for layer in (0, 1)
        for e in range(E)
        for key, shape in of_experts.items()
    } | {f"{start}.{layer}.{key}": shape for layer in (0, 1) for key, shape in of_attention.items()}
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert {key: tuple(t.shape) for key, t in written.items()} == expected
    assert done == Exported(len(expected), R, 0)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (R, 2 * R, modules)
    assert (config["rank_pattern"], config["alpha_pattern"], config["bias"]) == ({}, {}, "none")
    assert not config["target_parameters"]
    assert not config["use_dora"]
    assert not config["modules_to_save"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_values_are_those_of_each_expert(family: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    """By the definition of PEFT's form: A expert-major, B expert-minor, the rows of gate before those of up."""
    adapter = KINDS[family][1](tmp_path / "adapter")
    export_per_expert(adapter, tmp_path / "out", **meta(models(family)))
    given, written = load_file(adapter / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    block, gate, up, down = {
        "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
        "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    }[family]
    for layer in (0, 1):
        fused = f"base_model.model.model.layers.{layer}.mlp.experts"
        own = f"base_model.model.model.layers.{layer}.{block}.experts"
        for e in range(E):
            for name, key, rows in (
                (gate, f"{fused}.base_layer", slice(0, INNER)),
                (up, f"{fused}.base_layer", slice(INNER, 2 * INNER)),
                (down, fused, slice(0, HIDDEN)),
            ):
                a, b = given[f"{key}.lora_A.weight"], given[f"{key}.lora_B.weight"]
                assert torch.equal(written[f"{own}.{e}.{name}.lora_A.weight"], a[e * R : (e + 1) * R])
                assert torch.equal(written[f"{own}.{e}.{name}.lora_B.weight"], b[rows, e::E])
    untouched = [key for key in given if "self_attn" in key]
    assert untouched
    assert all(torch.equal(given[key], written[key]) for key in untouched)


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "mixtral", "gate_up_alone", "down_alone", "gate_and_up", "up", "shared", "rslora"]
)
def test_peft_computes_the_same_with_either_form(kind: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    family, make = KINDS[kind]
    adapter = make(tmp_path / "adapter")
    export_per_expert(adapter, tmp_path / "out", **meta(models(family)))
    expected = peft_logits(family, adapter)
    assert (logits_of(twin(family)) - expected).norm() > 1e-3 * expected.norm()
    assert_same_model(peft_logits(family, tmp_path / "out"), expected)


@for_each("kind", KINDS)
def test_both_ways_bit_for_bit(kind: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    family, make = KINDS[kind]
    adapter, model = make(tmp_path / "adapter"), meta(models(family))
    export_per_expert(adapter, tmp_path / "engine", **model)
    number = import_per_expert(tmp_path / "engine", tmp_path / "back", **model)
    assert number == len(load_file(adapter / WEIGHTS))
    assert same_tensors(tmp_path / "back", adapter)
    own = [folder / "meshlora.json" for folder in (adapter, tmp_path / "back")]
    assert own[0].is_file() == own[1].is_file()
    if own[0].is_file():
        assert json.loads(own[0].read_text()) == json.loads(own[1].read_text())
    if family in ("qwen3_moe", "mixtral", "deepseek_v3"):
        assert torch.equal(peft_logits(family, tmp_path / "back"), peft_logits(family, adapter))
    export_per_expert(tmp_path / "back", tmp_path / "again", **model)
    for name in (WEIGHTS, CONFIG):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "engine" / name).read_bytes()


def test_one_bit_decides_whether_gate_and_up_have_one_a(models: Callable[[str], Path], tmp_path: Path) -> None:
    adapter, model = KINDS["qwen3_moe"][1](tmp_path / "adapter"), meta(models("qwen3_moe"))
    export_per_expert(adapter, tmp_path / "engine", **model)
    tensors = load_file(tmp_path / "engine" / WEIGHTS)
    a = tensors["base_model.model.model.layers.1.mlp.experts.2.up_proj.lora_A.weight"]
    a[0, 0] = torch.nextafter(a[0, 0], torch.tensor(9.0, dtype=a.dtype))
    change(tmp_path / "engine", tensors)
    import_per_expert(tmp_path / "engine", tmp_path / "back", **model)
    fused = "base_model.model.model.layers.{}.mlp.experts.base_layer.lora_A.weight"
    back = load_file(tmp_path / "back" / WEIGHTS)
    assert [len(back[fused.format(layer)]) for layer in (0, 1)] == [R * E, 2 * R * E]
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert json.loads((tmp_path / "back" / "meshlora.json").read_text()) == {"pieces": {name: ["gate", "up"]}}
    assert_same_model(peft_logits("qwen3_moe", tmp_path / "back"), peft_logits("qwen3_moe", tmp_path / "engine"))


@pytest.mark.parametrize("use_rslora", [False, True])
def test_smaller_ranks_of_the_same_scale_are_padded_with_zeros(
    use_rslora: bool, models: Callable[[str], Path], tmp_path: Path
) -> None:
    unit = math.sqrt if use_rslora else float
    adapter = make_adapter(
        "qwen3_moe",
        tmp_path / "adapter",
        target_modules=["q_proj", "o_proj"],
        target_parameters=BOTH,
        r=4,
        lora_alpha=12,
        use_rslora=use_rslora,
        rank_pattern={"q_proj": 1, ".*down_proj": 2},
        alpha_pattern={"q_proj": 12 * unit(1) / unit(4), ".*down_proj": 12 * unit(2) / unit(4)},
    )
    done = export_per_expert(adapter, tmp_path / "out", **meta(models("qwen3_moe")))
    assert (done.r, done.num_padded) == (4, 4)  # q_proj and down_proj of two layers
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["lora_alpha"] / config["r"] == 12 / unit(4)
    assert (config["r"], config["use_rslora"]) == (4, False)
    given, written = load_file(adapter / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert {tuple(t.shape)[0 if "lora_A" in key else 1] for key, t in written.items()} == {4}
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    for side, dim in (("A", 0), ("B", 1)):
        kept, rest = written[q.format(side)].split([1, 3], dim)
        assert torch.equal(kept, given[q.format(side)])
        assert not rest.any()
    assert_same_model(peft_logits("qwen3_moe", tmp_path / "out"), peft_logits("qwen3_moe", adapter))


def test_the_largest_rank_may_be_that_of_a_pattern(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Then alpha is larger too."""
    patterns = {"rank_pattern": {".*down_proj": 4}, "alpha_pattern": {".*down_proj": 12}}
    adapter = make_adapter("qwen3_moe", tmp_path / "adapter", target_parameters=BOTH, r=2, lora_alpha=6, **patterns)
    export_per_expert(adapter, tmp_path / "out", **meta(models("qwen3_moe")))
    assert_same_model(peft_logits("qwen3_moe", tmp_path / "out"), peft_logits("qwen3_moe", adapter))


def test_patterns_of_other_targets_are_followed(engine: Path, models: Callable[[str], Path], tmp_path: Path) -> None:
    """As in files of other hands: PEFT had experts of linears once."""
    shutil.copytree(engine, tmp_path / "engine")
    tensors = load_file(engine / WEIGHTS)
    tensors |= {key: t[:2] if "lora_A" in key else t[:, :2] for key, t in tensors.items() if "q_proj" in key}
    change(tmp_path / "engine", tensors, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 5})
    import_per_expert(tmp_path / "engine", tmp_path / "back", **meta(models("qwen3_moe")))
    assert_same_model(peft_logits("qwen3_moe", tmp_path / "back"), peft_logits("qwen3_moe", tmp_path / "engine"))
