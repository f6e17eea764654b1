"""Adapter folders with one pair of factors for each expert: what serving engines read, and the way back."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from meshlora.adapter.engine_export import Exported, export_per_expert, import_per_expert
from meshlora.api import build_meta, read_model_config
from meshlora.cli import main
from meshlora.errors import MeshloraError, UnsupportedError, UserError
from meshlora.plan.topology import Topology
from tests.unit.test_expert_format import OWN, SIZES, assert_same_model, logits_of, random
from tests.unit.test_merge import one_error

E, R, HIDDEN, INNER = 4, 3, 32, 24
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
FAMILIES: dict[str, dict[str, Any]] = {
    **OWN,
    # The first layer is dense, the second has shared experts beside the routed ones.
    "deepseek_v3": {
        "intermediate_size": 48,
        "moe_intermediate_size": INNER,
        "n_routed_experts": E,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "nemotron_h": {
        "layers_block_type": ["attention", "moe"],
        "moe_intermediate_size": INNER,
        "n_routed_experts": E,
        "n_group": 1,
        "topk_group": 1,
        "intermediate_size": 48,
    },
    "phimoe": {"intermediate_size": INNER, "num_local_experts": E},
    "granitemoe": {"intermediate_size": INNER, "num_local_experts": E},
    "llama": {"intermediate_size": 48},
}


def twin(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> folder that holds its config.json, and no weights."""
    root = tmp_path_factory.mktemp("models")

    def make(family: str) -> Path:
        if not (root / family).is_dir():
            twin(family).config.save_pretrained(root / family)
        return root / family

    return make


def meta(model: Path) -> dict[str, Any]:
    config = read_model_config(model)
    hf_model, plan = build_meta(config, Topology.parse(""), dtype=torch.float32, disable_dropout=True)
    return {"model": hf_model, "plan": plan}


def make_adapter(family: str, folder: Path, **lora: Any) -> Path:
    """An adapter that PEFT saved, with random factors."""
    config = LoraConfig(**{"r": R, "lora_alpha": 2 * R, "target_modules": [], "task_type": "CAUSAL_LM"} | lora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(twin(family), config)
        for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter.data = 0.1 * random(*parameter.shape, seed=index)
        model.save_pretrained(folder)
    return folder


def change(folder: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    save_file({key: t.contiguous() for key, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    stored = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(stored | config))


def make_pieces(folder: Path, pieces: list[str]) -> Path:
    """Of qwen3_moe: an adapter on gate, up or both, each with an A of its own, in block form."""
    rank = R * len(pieces)
    patterns = {"rank_pattern": {".*gate_up_proj": rank}, "alpha_pattern": {".*gate_up_proj": 2 * rank}}
    make_adapter("qwen3_moe", folder, target_parameters=BOTH, **patterns)
    tensors = load_file(folder / WEIGHTS)
    for key in [key for key in tensors if key.endswith("base_layer.lora_B.weight")]:
        b = tensors[key].reshape(2, INNER, len(pieces), R, E).clone()  # the expert is the fast index
        for row, half in enumerate(("gate", "up")):
            for column, piece in enumerate(pieces):
                b[row, :, column] *= half == piece
        tensors[key] = b.reshape(2 * INNER, rank * E)
    change(folder, tensors)
    (folder / "meshlora.json").write_text(json.dumps({"pieces": {"experts.gate_up_proj": pieces}}))
    return folder


def make_shared(folder: Path) -> Path:
    """Of qwen3_moe: one adapter for all experts of a layer."""
    make_adapter("qwen3_moe", folder, target_parameters=BOTH)
    tensors = load_file(folder / WEIGHTS)
    for key, tensor in tensors.items():
        if "lora_A" in key:
            tensors[key] = tensor[:R].repeat(E, 1)
        else:
            tensors[key] = tensor.reshape(len(tensor), R, E)[:, :, :1].repeat(1, 1, E).flatten(1)
    change(folder, tensors)
    (folder / "meshlora.json").write_text(json.dumps({"pieces": {}, "share_experts": True}))
    return folder


KINDS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "qwen3_moe": (
        "qwen3_moe",
        lambda f: make_adapter("qwen3_moe", f, target_modules=["q_proj", "o_proj"], target_parameters=BOTH),
    ),
    "mixtral": (
        "mixtral",
        lambda f: make_adapter("mixtral", f, target_modules=["v_proj"], target_parameters=BOTH),
    ),
    "gate_up_alone": ("mixtral", lambda f: make_adapter("mixtral", f, target_parameters=BOTH[:1])),
    "down_alone": ("mixtral", lambda f: make_adapter("mixtral", f, target_parameters=BOTH[1:])),
    "one_layer": (
        "qwen3_moe",
        lambda f: make_adapter(
            "qwen3_moe",
            f,
            target_modules=["model.layers.0.self_attn.q_proj"],
            target_parameters=[f"model.layers.1.mlp.{name}" for name in BOTH],
        ),
    ),
    "layers_that_differ": (
        "qwen3_moe",
        lambda f: make_adapter(
            "qwen3_moe", f, target_parameters=["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
        ),
    ),
    "dense_and_shared_experts": (
        "deepseek_v3",
        lambda f: make_adapter(
            "deepseek_v3",
            f,
            target_modules=["q_b_proj", "o_proj"],
            target_parameters=[
                *BOTH,
                *(f"model.layers.0.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
                "model.layers.1.mlp.shared_experts.down_proj.weight",
            ],
        ),
    ),
    "no_gate": (
        "nemotron_h",
        lambda f: make_adapter("nemotron_h", f, target_parameters=["experts.up_proj", "experts.down_proj"]),
    ),
    "embedding_and_head": (
        "qwen3_moe",
        lambda f: make_adapter("qwen3_moe", f, target_modules=["embed_tokens", "lm_head"], target_parameters=BOTH),
    ),
    "rslora": ("mixtral", lambda f: make_adapter("mixtral", f, target_parameters=BOTH, use_rslora=True)),
    "gate_and_up": ("qwen3_moe", lambda f: make_pieces(f, ["gate", "up"])),
    "up": ("qwen3_moe", lambda f: make_pieces(f, ["up"])),
    "shared": ("qwen3_moe", lambda f: make_shared(f)),
}


def same_tensors(one: Path, other: Path) -> bool:
    a, b = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def peft_logits(family: str, adapter: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of patterns that PEFT follows, and of layers without an adapter
        return logits_of(PeftModel.from_pretrained(twin(family), adapter, autocast_adapter_dtype=False))


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


@pytest.mark.parametrize("kind", KINDS)
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
        (
            "phimoe",
            {"target_modules": ["router"], "target_parameters": BOTH},
            "LoRA on the router model.layers.0.mlp.rout",
        ),
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


def expert_key(name: str, layer: int = 1, e: int = 2) -> str:
    return f"base_model.model.model.layers.{layer}.mlp.experts.{e}.{name}.weight"


Q_KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "a_hole": (
        lambda t: t.pop(expert_key("up_proj.lora_B")),
        "lacks 1 of 4 experts' factors, first .*2.up_proj.lora_B",
    ),
    "nan": (
        lambda t: t[expert_key("gate_proj.lora_A")].fill_(math.nan),
        "experts.2.gate_proj.lora_A.*not finite",
    ),
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


@pytest.fixture(scope="module")
def engine(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    export_per_expert(KINDS["qwen3_moe"][1](folder / "adapter"), folder / "engine", **meta(models("qwen3_moe")))
    return folder / "engine"


@pytest.mark.parametrize("damage", DAMAGES)
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
    ],
)
def test_configurations_that_say_more_than_the_file_are_refused(
    option: dict[str, Any], words: str, engine: Path, models: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    change(tmp_path / "engine", load_file(engine / WEIGHTS), **option)
    with pytest.raises(UnsupportedError, match=words):
        import_per_expert(tmp_path / "engine", tmp_path / "out", **meta(models("qwen3_moe")))


def test_patterns_of_other_targets_are_followed(engine: Path, models: Callable[[str], Path], tmp_path: Path) -> None:
    """As in files of other hands: PEFT had experts of linears once."""
    shutil.copytree(engine, tmp_path / "engine")
    tensors = load_file(engine / WEIGHTS)
    tensors |= {key: t[:2] if "lora_A" in key else t[:, :2] for key, t in tensors.items() if "q_proj" in key}
    change(tmp_path / "engine", tensors, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 5})
    import_per_expert(tmp_path / "engine", tmp_path / "back", **meta(models("qwen3_moe")))
    assert_same_model(peft_logits("qwen3_moe", tmp_path / "back"), peft_logits("qwen3_moe", tmp_path / "engine"))


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

    monkeypatch.setattr("meshlora.adapter.peft_format.save_file", lossy)
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
        ([str(file), "--layout", "peft", "--out", new, "--model", model], ("leave out --model",)),
        ([*line, "--out", new, "--model", model, "--lora-alpha", "3"], ("--lora-alpha", "leave out")),
    ]
    capfd.readouterr()
    for words_of_line, words in cases:
        before = sorted(tmp_path.rglob("*"))
        assert main(["export", *words_of_line]) == 2, words_of_line
        message = one_error(*capfd.readouterr())
        assert not [word for word in words if word not in message], message
        assert sorted(tmp_path.rglob("*")) == before
