"""Base weights of experts: every rank's part, from checkpoints that store experts one by one and from fused ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

import meshlora.model.weights
from meshlora.comm.groups import Axis, Mesh
from meshlora.model.inject import parallelize
from meshlora.model.stored import Part, Stored, StoredTensor
from meshlora.model.weights import CheckpointSource, Source, StateDictSource, check_checkpoint, fill
from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import MeshloraError, UnsupportedError, UserError
from meshlora_ground.topology import Topology, axis_sets
from meshlora_judge.twin import twin_config
from tests.blueprints import build_meta
from tests.for_each import for_each

# family -> whether transformers saves its experts one by one.
FAMILIES = {
    "qwen3_moe": True,
    "mixtral": True,
    "deepseek_v3": True,
    "longcat_flash": True,
    "nemotron_h": True,
    "gpt_oss": False,
    "llama4_text": False,
    "granitemoe": False,
}
FILE = "model.safetensors"


def make_checkpoint(folder: Path, family: str, **sizes: Any) -> PretrainedConfig:
    config = twin_config(family, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # biases too
    model.save_pretrained(folder)
    return config


def fuse(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Store what stores experts one by one as the model holds them, and keep all other keys."""
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    stored = {key: t for key, t in load_file(folder / FILE).items() if not re.search(r"experts\.\d+\.", key)}
    stored |= {name: t.contiguous() for name, t in state.items() if ".experts." in name and t.ndim == 3}
    save_file(stored, folder / FILE, metadata={"format": "pt"})


def fake_mesh(topology: Topology, rank: int) -> Mesh:
    """The mesh that rank `rank` would have, without process groups."""
    axes = {}
    for names in axis_sets((), has_experts=True):
        ranks = next(group for group in topology.groups_over(names) if rank in group)
        axes[names] = Axis(len(ranks), ranks.index(rank), tuple(ranks), None)
    return Mesh(topology, rank, torch.device("cpu"), axes)


def local_state(
    config: PretrainedConfig, topology: str, rank: int, source: Callable[[Any], Source]
) -> dict[str, Tensor]:
    """What rank `rank` of `topology` holds, by the names of its own modules."""
    parsed = Topology.parse(topology)
    model, plan = build_meta(config, parsed, dtype=torch.float32, disable_dropout=True)
    found = source(model)
    mesh = fake_mesh(parsed, rank)
    parallelize(model, plan, mesh, targets=set(), dtype=torch.float32)
    fill(model, plan, found, mesh)
    assert plan.experts, "the twin has no experts"
    check_experts_are_there(model, plan)
    return dict(model.state_dict())


def check_experts_are_there(model: Any, plan: ModelPlan) -> None:
    for name, rule in plan.projections.items():
        module = model.get_submodule(name)
        assert (module.bias is not None) == rule.has_bias


def expected_part(config: PretrainedConfig, topology: str, rank: int, name: str, whole: Tensor) -> Tensor:
    """By hand: which experts, which of their features. name: of the whole."""
    sizes = Topology.parse(topology)
    etp, ep = rank % sizes.etp, rank // sizes.etp % sizes.ep
    own = whole[: getattr(config, "n_routed_experts", None)].chunk(sizes.ep)[ep]  # without those that compute nothing
    is_bias, leaf = name.endswith("_bias"), name.rpartition(".")[2].removesuffix("_bias")
    is_transposed = config.model_type in ("gpt_oss", "llama4_text")
    if leaf == "down_proj":
        return own if is_bias else own.chunk(sizes.etp, 1 if is_transposed else 2)[etp]
    dim = 2 if is_transposed and not is_bias else 1
    if leaf == "up_proj":
        return own.chunk(sizes.etp, dim)[etp]
    if config.model_type == "gpt_oss":  # gate and up alternate
        gate, up = (own.index_select(dim, torch.arange(start, own.shape[dim], 2)) for start in (0, 1))
        parts = [half.chunk(sizes.etp, dim)[etp] for half in (gate, up)]
        return torch.stack(parts, dim + 1).flatten(dim, dim + 1)
    gate, up = own.chunk(2, dim)
    return torch.cat([half.chunk(sizes.etp, dim)[etp] for half in (gate, up)], dim)


def assert_every_part(config: PretrainedConfig, folder: Path, source: Callable[[Any], Source]) -> None:
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    names = [n for n in whole if re.search(r"experts\.(gate_up_proj|up_proj|down_proj)(_bias)?$", n)]
    assert names
    for topology in ("ep=1", "ep=2", "etp=2", "ep=2,etp=2", "ep=4"):
        for rank in range(Topology.parse(topology).world):
            held = local_state(config, topology, rank, source)
            for name in names:
                base = name.removesuffix("_bias")
                ours = held[f"{base}.bias" if name.endswith("_bias") else f"{base}.weight"]
                assert torch.equal(ours, expected_part(config, topology, rank, name, whole[name])), (
                    topology,
                    rank,
                    name,
                )


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_is_that_of_what_transformers_loads(family: str, tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path, family)
    keys = load_file(tmp_path / FILE).keys()
    assert any(re.search(r"experts\.\d+\.", key) for key in keys) == FAMILIES[family]
    assert_every_part(config, tmp_path, lambda model: CheckpointSource(tmp_path, model))


@pytest.mark.parametrize("family", [family for family, is_apart in FAMILIES.items() if is_apart])
def test_the_same_where_they_are_stored_as_the_model_holds_them(family: str, tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path, family)
    fuse(tmp_path)
    assert not any(re.search(r"experts\.\d+\.", key) for key in load_file(tmp_path / FILE))
    assert_every_part(config, tmp_path, lambda model: CheckpointSource(tmp_path, model))


def test_linears_of_single_experts_are_turned_for_a_model_that_takes_rows_from_the_left(tmp_path: Path) -> None:
    """Those of Llama 4 in compressed-tensors, for which transformers has no conversion."""
    config = make_checkpoint(tmp_path, "llama4_text")
    apart = tmp_path / "apart"
    apart.mkdir()
    stored: dict[str, Tensor] = {}
    for key, tensor in load_file(tmp_path / FILE).items():
        owner, _, leaf = key.rpartition(".")
        if not owner.endswith(".experts"):
            stored[key] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = matrix.T.chunk(2) if leaf == "gate_up_proj" else (matrix.T,)
            for name, part in zip(("gate_proj", "up_proj") if len(parts) > 1 else (leaf,), parts, strict=True):
                stored[f"{owner}.{expert}.{name}.weight"] = part.contiguous()
    save_file(stored, apart / FILE, metadata={"format": "pt"})
    assert_every_part(config, tmp_path, lambda model: CheckpointSource(apart, model))


def test_stacks_are_concatenated_along_the_dim_of_their_conversion() -> None:
    """gate and up of all experts of a layer, as step3p7 stores them."""
    gate, up = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    parts = tuple(StoredTensor.in_memory(name, tensor) for name, tensor in (("gate", gate), ("up", up)))
    source = Source({"gate_up": Stored((parts,), dim=1)}, "it")
    whole = torch.cat([gate, up], 1)
    assert source.shape("gate_up") == whole.shape
    assert torch.equal(source.read("gate_up", Part(0, 1, 2), Part(1, 2, 5)), whole[1:2, 2:5])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_same_from_memory(family: str, tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path, family)
    state = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict())
    assert_every_part(config, tmp_path, lambda model: StateDictSource(state))


def test_experts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Ten experts and more: as text, 10 comes before 2."""
    config = make_checkpoint(tmp_path, "qwen3_moe", num_experts=12)
    assert_every_part(config, tmp_path, lambda model: CheckpointSource(tmp_path, model))


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_rank_reads_its_own_experts_alone(is_fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_checkpoint(tmp_path, "qwen3_moe")
    if is_fused:
        fuse(tmp_path)
    read: dict[str, int] = {}
    original = meshlora.model.weights.read_slice

    def counted(stored: Any, parts: Any) -> Tensor:
        value: Tensor = original(stored, parts)
        read[stored.key] = read.get(stored.key, 0) + value.numel()
        return value

    monkeypatch.setattr(meshlora.model.weights, "read_slice", counted)
    held = local_state(config, "ep=2,etp=2", 3, lambda model: CheckpointSource(tmp_path, model))
    of_experts = {key: number for key, number in read.items() if ".experts." in key}
    assert sum(of_experts.values()) == sum(t.numel() for name, t in held.items() if ".experts." in name)
    if not is_fused:
        numbers = {int(key.split(".experts.")[1].split(".")[0]) for key in of_experts}
        assert numbers == set(range(config.num_experts // 2, config.num_experts))


# What goes wrong.

GATE, DOWN = (f"model.layers.1.mlp.experts.2.{name}_proj.weight" for name in ("gate", "down"))
LAST = "model.layers.1.mlp.experts.{}.{}_proj.weight"
MISTAKES: dict[str, tuple[Callable[[dict[str, Tensor], int], Any], type[MeshloraError], tuple[str, ...]]] = {
    "a_matrix": (lambda t, n: t.pop(GATE), UserError, (GATE, "it is missing", "expert 2")),
    "an_expert": (
        lambda t, n: [t.pop(key) for key in list(t) if ".1.mlp.experts.2." in key],
        UserError,
        (GATE, "it is missing"),
    ),
    "the_last_expert": (
        lambda t, n: [t.pop(key) for key in list(t) if f".1.mlp.experts.{n - 1}." in key],
        UserError,
        (LAST.format("{n}", "gate"), "it is missing", "{N} experts"),
    ),
    "all_of_a_layer": (
        lambda t, n: [t.pop(key) for key in list(t) if ".1.mlp.experts." in key],
        UserError,
        ("lacks 2 weights", "model.layers.1.mlp.experts.gate_up_proj"),
    ),
    "too_many": (
        lambda t, n: [t.update({LAST.format(n, k): t[LAST.format(0, k)].clone()}) for k in ("gate", "up", "down")],
        UserError,
        (LAST.format("{N}", "gate"), "config.json says {N} experts"),
    ),
    "shape": (
        lambda t, n: t.update({GATE: t[GATE][1:].clone()}),
        UserError,
        (GATE, "its shape is [31, 64]", "[32, 64]"),
    ),
    "shape_of_all": (
        lambda t, n: t.update({k: v[:, 1:].clone() for k, v in t.items() if ".experts." in k and "down" in k}),
        UserError,
        ("mlp.experts.0.down_proj.weight", "its shape is [64, 31]", "[64, 32]"),
    ),
    "dims": (lambda t, n: t.update({DOWN: t[DOWN].flatten()}), UserError, (DOWN, "[2048]", "[64, 32]")),
    "integers": (lambda t, n: t.update({DOWN: t[DOWN].to(torch.int8)}), UnsupportedError, (DOWN, "integers")),
    "stored_twice": (
        lambda t, n: t.update({"model.layers.1.mlp.experts.down_proj": torch.zeros(n, 64, 32)}),
        UserError,
        ("model.layers.1.mlp.experts.down_proj", "experts.0.down_proj", "same parameter"),
    ),
}


@for_each("name", MISTAKES)
def test_mistake_names_the_key_that_is_stored(name: str, tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / FILE)
    make, kind, words = MISTAKES[name]
    make(tensors, config.num_experts)
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    model, _ = build_meta(config, Topology.parse("ep=2"), dtype=torch.float32)
    with pytest.raises(kind) as caught:
        check_checkpoint(model, CheckpointSource(tmp_path, model))
    text = str(caught.value)
    assert str(tmp_path) in text
    for word in words:
        assert word.replace("{n}", str(config.num_experts - 1)).replace("{N}", str(config.num_experts)) in text


def test_experts_of_layers_that_the_model_has_not_are_no_mistake(tmp_path: Path) -> None:
    """deepseek_v3 stores a layer for multi-token prediction, experts and all; here one that is not even whole."""
    config = make_checkpoint(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / FILE)
    tensors["model.layers.7.mlp.experts.3.gate_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    model, _ = build_meta(config, Topology.parse("ep=2"), dtype=torch.float32)
    with pytest.raises(UserError, match=r"1 of its weights have no place .* model.layers.7.mlp.experts"):
        check_checkpoint(model, CheckpointSource(tmp_path, model))
    check_checkpoint(model, CheckpointSource(tmp_path, model), allow_unused=True)
