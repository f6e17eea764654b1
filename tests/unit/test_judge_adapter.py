"""`meshlora judge adapter`: nothing is found in what PEFT trains and saves, and each fault is named as what it is."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

import meshlora
from meshlora.adapter.formats.peft_format import save_adapter
from meshlora.adapter.targets.pieces import PieceLoraConfig
from meshlora.cli.main import main
from meshlora_judge.adapter_files.differences import cause_of, differences_from
from meshlora_judge.adapter_files.reading import open_adapter
from meshlora_judge.adapter_files.values import expert_major, parts_of, repeats
from meshlora_judge.adapter_files.verdict import judge_folder
from meshlora_judge.case import random_tokens
from meshlora_judge.inputs import write_adapter, write_twin
from meshlora_judge.reference import reference_run
from meshlora_judge.settings import Base, Training
from tests.adapter_folders import CONFIG, LORA, MOE, PREFIX, SMALL, SOUND, STACKS, WEIGHTS, Recipe, Tensors, files, make

# What is said beside "sound", where it is right to say something.
NOTES = {
    "gemma3n, layers that share keys": "modules have no factors, which those of other layers have (4: ",
    "a composite whose images no text shows": "B is zero, so nothing was trained in these modules (15: ",
}
EXPERTS = "experts barely reached"


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_in_what_peft_trains_and_saves(name: str, tmp_path: Path) -> None:
    folder, base = make(SOUND[name], tmp_path)
    for model in (None, base):
        verdict = judge_folder(folder, model=model)
        assert verdict.is_sound, verdict.paragraph()
        assert len(verdict.notes) <= 1
        if model is None or "composite" in name:
            assert NOTES.get(name, "Note") in f"{verdict.paragraph()} Note"
        else:
            assert not verdict.notes


# Adapters as meshlora saves them: family, sizes, LoRA.
OURS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", {}, {"target_modules": "all-linear", "modules_to_save": ["lm_head"]}),
    "pieces": (
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4},
        {"target_modules": ["c_attn"], "pieces": {"c_attn": ["q"]}},
    ),
    "experts": ("qwen3_moe", MOE, {"target_modules": ["q_proj"], "target_parameters": STACKS}),
    "shared by experts": (
        "qwen3_moe",
        MOE,
        {"target_modules": ["q_proj"], "target_parameters": STACKS, "share_experts": True},
    ),
}


@pytest.mark.parametrize("name", OURS)
def test_nothing_is_found_in_what_meshlora_saves(name: str, tmp_path: Path) -> None:
    family, sizes, options = OURS[name]
    config = AutoConfig.for_model(family, **({"vocab_size": 64} if family == "gpt2" else SMALL) | sizes)
    config.save_pretrained(tmp_path / "base")
    model = meshlora.load(
        config, lora=PieceLoraConfig(r=4, lora_alpha=8, **options), device="cpu", disable_dropout=True
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    save_adapter(model, tmp_path / "adapter")
    for base in (None, tmp_path / "base"):
        verdict = judge_folder(tmp_path / "adapter", model=base)
        assert verdict.is_sound, verdict.paragraph()
        assert [note.kind for note in verdict.notes] == (["piece"] if name == "pieces" else [])


def test_reference_saves_an_adapter_that_experts_share_as_peft_reads_it(tmp_path: Path) -> None:
    base, start, out = (tmp_path / name for name in ("base", "start", "out"))
    write_twin(AutoConfig.for_model("qwen3_moe", **SMALL | MOE), base, dtype=torch.float64, seed=0)
    lora = {"r": 2, "target_modules": ["q_proj"], "target_parameters": STACKS}
    write_adapter(base, lora, start, seed=0, trust_remote_code=False, share_experts=True)
    data = random_tokens(num_sequences=4, vocab_size=64, seed=0)
    settings = Training(steps=1, batch_size=4, micro_batch_size=2, lr=1e-2)
    reference_run(Base(str(base), dtype="float64"), settings, data, pad_token_id=0, adapter=start, out=out)
    begun, trained = load_file(start / WEIGHTS), load_file(out / WEIGHTS)
    assert trained.keys() == begun.keys()
    assert not any(torch.equal(tensor, begun[key].to(tensor.dtype)) for key, tensor in trained.items())
    assert judge_folder(out, model=base).is_sound


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Gives (adapter, base) of a recipe of `SOUND`, made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def give(name: str) -> tuple[Path, Path]:
        if name not in made:
            made[name] = make(SOUND[name], tmp_path_factory.mktemp("sound"))
        return made[name]

    return give


def broken(given: Path, folder: Path, change: Callable[[Tensors, dict[str, Any]], Any]) -> Path:
    """A copy of the adapter `given`, changed."""
    shutil.copytree(given, folder)
    tensors, config = load_file(given / WEIGHTS), json.loads((given / CONFIG).read_text())
    tensors = change(tensors, config) or tensors
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def each(
    side: str, change: Callable[[Tensor], Tensor], where: str = ""
) -> Callable[[Tensors, dict[str, Any]], Tensors]:
    def changed(tensors: Tensors, _: dict[str, Any]) -> Tensors:
        return {key: change(t) if f".lora_{side}." in key and where in key else t for key, t in tensors.items()}

    return changed


def renamed(change: Callable[[str], str], where: str = "") -> Callable[[Tensors, dict[str, Any]], Tensors]:
    def changed(tensors: Tensors, _: dict[str, Any]) -> Tensors:
        return {change(key) if where in key else key: tensor for key, tensor in tensors.items()}

    return changed


def with_config(**fields: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda _, config: config.update(fields)


def without(where: str) -> Callable[[Tensors, dict[str, Any]], Tensors]:
    return lambda tensors, _: {key: tensor for key, tensor in tensors.items() if not re.search(where, key)}


def shard(number: int, of: int, dim: int) -> Callable[[Tensor], Tensor]:
    """Part `number` of `of` of a tensor, zeros elsewhere."""

    def cut(tensor: Tensor) -> Tensor:
        size = math.ceil(tensor.shape[dim] / of)
        mask = torch.zeros(tensor.shape[dim])
        mask[(number - 1) * size : number * size] = 1
        return tensor * (mask[:, None] if dim == 0 else mask)

    return cut


def pieces_zero(tensor: Tensor) -> Tensor:
    return torch.cat(
        [
            half * torch.cat([torch.ones(len(half) // 2), torch.zeros(len(half) // 2)])[:, None]
            for half in tensor.chunk(2)
        ]
    )


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    def changed(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[1, 1] = value
        return tensor

    return changed


def of_expert(number: int, of: int) -> Callable[[Tensors, dict[str, Any]], Tensors]:
    """Experts from `number` on emptied."""

    def changed(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        rank = config["r"]
        for key, tensor in tensors.items():
            if ".lora_A." in key:
                tensor[number * rank :] = 0
            else:
                tensor.view(len(tensor), rank, of)[:, :, number:] = 0
        return tensors

    return changed


def expert_by_expert(tensors: Tensors, config: dict[str, Any]) -> None:
    """Experts of which each has a direction of its own, as after many steps, and B expert by expert."""
    for key, tensor in tensors.items():
        if ".lora_B." in key:
            directions = torch.randn(len(tensor), 16, 1, generator=torch.Generator().manual_seed(1))
            noise = torch.randn(len(tensor), 16, config["r"], generator=torch.Generator().manual_seed(2))
            tensor.copy_((directions + 0.5 * noise).flatten(1))


def twice(tensors: Tensors, _: dict[str, Any]) -> None:
    for key in list(tensors):
        tensors[key.replace("layers.0", "_orig_mod.layers.0")] = tensors[key].clone()


def drifted(tensors: Tensors, _: dict[str, Any]) -> None:
    for key in list(tensors):
        for rank in (1, 2):
            tensors[f"{key}.rank{rank}"] = tensors[key] + rank * 1e-3


def two_adapters(tensors: Tensors, _: dict[str, Any]) -> Tensors:
    return {key.replace(".weight", f".{name}.weight"): t * 1 for name in ("one", "two") for key, t in tensors.items()}


FSDP = "gather (full_tensor, summon_full_params) before saving"
# What is done to which sound adapter, and the words that name it.
BROKEN: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "axolotl 3772": ("llama", each("B", shard(1, 8, 0)), ("only part 1 of 8 of the rows of B is not zero (14: ", FSDP)),
    "the last shard": ("llama", each("B", shard(4, 4, 0)), ("only part 4 of 4 of the rows of B is not zero (14: ",)),
    "uneven shards": ("odd sizes", each("B", shard(3, 3, 0)), ("only part 3 of 3 of the rows of B",)),
    "shards of columns": ("llama", each("A", shard(2, 2, 1)), ("only part 2 of 2 of the columns of A",)),
    "row-parallel alone": (
        "llama",
        each("A", shard(1, 2, 1), "o_proj"),
        ("part 1 of 2 of the columns of A is not zero (2: ",),
    ),
    "a shard of a fused matrix": ("gpt_neox", each("B", shard(1, 8, 0)), ("only part 1 of 8 of the rows of B",)),
    "a shard of an adapter of rank 1": (
        "one module",
        each("B", shard(2, 2, 0)),
        ("only part 2 of 2 of the rows of B is",),
    ),
    "shards of gate and up": ("llama", each("B", pieces_zero), ("blocks of rows or columns are exactly zero",)),
    "a shard of experts' B": (EXPERTS, each("B", shard(1, 4, 0)), ("only part 1 of 4 of the rows of B",)),
    "a shard twice": (
        "llama",
        each("B", lambda b: b.chunk(2)[0].repeat(2, 1)),
        ("halves of the rows of B are equal", "gathered 2 times"),
    ),
    "a shard four times": (
        "llama",
        each("A", lambda a: a.chunk(4, 1)[0].repeat(1, 4)),
        ("4 parts of the columns of A are equal",),
    ),
    "NaN": (
        "llama",
        each("B", with_value(math.nan), "layers.1.mlp.up"),
        ("NaN or infinite (1: ", "layers.1.mlp.up_proj.lora_B"),
    ),
    "overflow": (
        "float16",
        each("A", with_value(math.inf), "0.self_attn.q"),
        ("in float16: above 65,504 it overflows (1: ",),
    ),
    "fresh": ("llama", each("B", torch.zeros_like), ("never trained: B is zero everywhere, as PEFT makes it (14: ",)),
    "a fresh embedding": (
        "embedding",
        lambda tensors, _: {k: t * 0 if "embedding_A" in k or "lora_B" in k else t for k, t in tensors.items()},
        ("never trained",),
    ),
    "both factors zero": (
        "llama",
        lambda t, _: {k: v * ("layers.1" not in k) for k, v in t.items()},
        ("both factors are zero: they were never written (7: ",),
    ),
    "A zero": (
        "llama",
        each("A", torch.zeros_like, "k_proj"),
        ("A is zero where B is not (2: ".replace(" (2", ", which no training leaves (2"),),
    ),
    "a B missing": (
        "llama",
        without(r"0\.self_attn\.q_proj\.lora_B"),
        ("one factor without the other (1: model.layers.0.self_attn.q_proj.lora_A",),
    ),
    "a module missing": (
        "some of four",
        without(r"2\.mlp\.up_proj"),
        ("modules have no factors, which those of other layers have (1: model.layers.2.mlp.up_proj",),
    ),
    "torch.compile": (
        "llama",
        renamed(lambda k: k.replace("base_model.model.", "base_model.model._orig_mod.")),
        ("PEFT would drop these tensors silently: their names have the name of a wrapper",),
    ),
    "FSDP1": (
        "llama",
        renamed(lambda k: k.replace(".layers.1.", ".layers.1._fsdp_wrapped_module.")),
        ("the name of a wrapper (FSDP, torch.compile or checkpointing) (14: ",),
    ),
    "DDP": ("llama", renamed(lambda k: f"module.{k}"), ("their names have the prefix module. of a wrapper (28: ",)),
    "named": (
        "llama",
        renamed(lambda k: k.replace(".weight", ".default.weight")),
        ("their names have the adapter's name 'default' (28: ",),
    ),
    "without the prefix": (
        "llama",
        renamed(lambda k: k.removeprefix(PREFIX)),
        (f"their names have no prefix {PREFIX} (28: ",),
    ),
    "wrapped twice": (
        "llama",
        renamed(lambda k: f"{PREFIX}{k}"),
        (f"their names have the prefix {PREFIX} twice (28: ",),
    ),
    "there twice": ("llama", twice, ("tensors are there twice, under two names (14: ",)),
    "replicas": (
        "llama",
        drifted,
        ("one tensor is there under two names with different values: replicas that drifted",),
    ),
    "two adapters": ("llama", two_adapters, ("it holds 2 adapters (2: one, two)",)),
    "another rank": (
        "llama",
        with_config(r=8),
        ("ranks are not those of the configuration (14: ", "4 in the file, 8 in the configuration"),
    ),
    "a pattern lost": (
        "patterns",
        with_config(rank_pattern={}),
        ("ranks are not those of the configuration (3: ", "q_proj: 2 in the file, 4 in"),
    ),
    "a shard of ranks": (
        "llama",
        each("B", lambda b: b[:, :2]),
        ("A and B have different ranks: one of them is a shard (14: ",),
    ),
    "transposed A": ("llama", each("A", lambda a: a.T), ("a factor is transposed: PEFT has A as [r, in]",)),
    "transposed B": ("llama", each("B", lambda b: b.T), ("a factor is transposed",)),
    "flat": ("llama", each("B", torch.flatten), ("factors are empty or have one dim: shards of ZeRO-3 or FSDP",)),
    "empty": ("llama", each("B", lambda b: b[:0]), ("factors are empty or have one dim: shards of ZeRO-3",)),
    "rank 0": ("llama", with_config(r=0), ("r is 0 (1: r=0); give the rank of the factors",)),
    "scaled off": (
        "llama",
        with_config(lora_alpha=0),
        ("lora_alpha is 0: PEFT multiplies these factors by zero (14: ",),
    ),
    "mixed types": ("llama", each("B", Tensor.bfloat16), ("A and B of one module have different types (14: ",)),
    "integers": (
        "llama",
        each("B", lambda b: (b * 1000).to(torch.int8)),
        ("tensors of a type that no factor is trained in (14: ", "of int8"),
    ),
    "float8": (
        "llama",
        lambda t, _: {k: v.to(torch.float8_e4m3fn) for k, v in t.items()},
        ("of a type that no factor is trained in (28: ",),
    ),
    "experts lost": (
        EXPERTS,
        of_expert(8, 16),
        ("experts whose two factors are zero (4: ", "experts.base_layer: 8 of 16, first 8"),
    ),
    "expert by expert": (
        EXPERTS,
        expert_by_expert,
        ("columns of B lie expert by expert, where PEFT has them rank by rank",),
    ),
    "magnitudes lost": ("dora", without("magnitude"), ("DoRA's magnitudes are missing, which use_dora needs (8: ",)),
    "magnitudes zero": (
        "dora",
        lambda t, _: {k: v * ("magnitude" not in k) for k, v in t.items()},
        ("DoRA's magnitude is zero",),
    ),
    "DoRA forgotten": (
        "dora",
        with_config(use_dora=False),
        ("magnitudes of DoRA, which the configuration does not have (8: ",),
    ),
    "modules lost": (
        "modules to save",
        without("lm_head|embed"),
        ("no module of modules_to_save is in the file (2: ",),
    ),
    "tokens lost": ("tokens", without("trainable_tokens_delta"), ("no rows of trained tokens are in the file",)),
    "biases lost": ("bias of B", without("bias"), ("biases of B are missing, which lora_bias needs (8: ",)),
    "a slip": (
        "llama",
        lambda _, c: c.update({"lora_alhpa": c.pop("lora_alpha")}),
        ("near to names that it knows (1: lora_alhpa for lora_alpha)",),
    ),
    "an unknown method": (
        "llama",
        with_config(peft_type="NEWLORA"),
        ("the installed peft has no such peft_type (1: NEWLORA)",),
    ),
}
SOUND_FOR = SOUND | {"some of four": Recipe(sizes={"num_hidden_layers": 4})}


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_is_named_as_what_it_is(
    name: str, tmp_path: Path, sound: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, change, words = BROKEN[name]
    monkeypatch.setitem(SOUND, given, SOUND_FOR[given])
    verdict = judge_folder(broken(sound(given)[0], tmp_path / "broken", change))
    said = " ".join(str(finding) for finding in verdict.wrong)
    for each in words:
        assert each in said
    assert len(verdict.wrong) <= 3, said


def padded(tensors: Tensors, _: dict[str, Any]) -> None:
    """The upper half of the ranks unused, as engines pad a smaller rank."""
    for key, tensor in tensors.items():
        (tensor if ".lora_A." in key else tensor.T)[2:] = 0


# What a sound adapter may have, too: what is done, and the note.
NOTED: dict[str, tuple[Any, str]] = {
    "other types": (
        lambda t, _: {k: v.double() if "q_proj" in k else v for k, v in t.items()},
        "factors are of float32, float64",
    ),
    "fields of tomorrow": (
        with_config(use_foo=True, bar=None),
        "the installed peft does not know and ignores (1: use_foo)",
    ),
    "a module not reached": (each("B", torch.zeros_like, "down_proj"), "nothing was trained in these modules (2: "),
    "padded ranks": (padded, ""),
}


@pytest.mark.parametrize("name", NOTED)
def test_what_a_sound_adapter_may_have_is_a_note(
    name: str, tmp_path: Path, sound: Callable[[str], tuple[Path, Path]]
) -> None:
    change, words = NOTED[name]
    verdict = judge_folder(broken(sound("llama")[0], tmp_path / "noted", change))
    assert verdict.is_sound, verdict.paragraph()
    assert len(verdict.notes) == bool(words)
    assert words in verdict.paragraph()


def test_targets_without_any_factor_are_said(tmp_path: Path, sound: Callable[[str], tuple[Path, Path]]) -> None:
    """A list of targets may name modules that this base lacks: only the base tells whether they were lost."""
    folder, base = sound("llama")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "query"]
    given = broken(folder, tmp_path / "one", with_config(target_modules=targets))
    (note,) = judge_folder(given).notes
    assert "targets of the configuration have no factor (1: query)" in str(note)
    assert judge_folder(given, model=base).is_sound
    assert not judge_folder(given, model=base).notes


# The same with the base: what only PEFT on the model can tell.
WITH_MODEL: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "a target lost everywhere": (
        "llama",
        without("up_proj"),
        ("tensors that PEFT needs on ", "are not in the file", "(4: "),
    ),
    "the last layer lost": ("llama", without(r"layers\.1\."), ("and would stay as they are drawn (14: ",)),
    "another module": (
        "llama",
        renamed(lambda k: k.replace("up_proj", "w3")),
        ("PEFT would drop these tensors silently (4: ",),
    ),
    "a wrapper": (
        "llama",
        renamed(lambda k: f"module.{k}"),
        ("the prefix module. of a wrapper (28: ", "would stay as they are drawn (28: "),
    ),
    "another width": (
        "llama",
        each("B", lambda b: b[:16], "up_proj"),
        ("shapes are not those that PEFT makes (2: ", "[16, 4] for [48, 4]"),
    ),
    "another rank": ("llama", with_config(r=8), ("shapes are not those that PEFT makes (28: ",)),
    "a head lost": (
        "modules to save",
        without("lm_head"),
        ("tensors that PEFT needs on ", "(1: base_model.model.lm_head.weight)"),
    ),
    "absurd": (
        "llama",
        each("B", lambda b: b * 1e5),
        ("the delta s B A is far larger than the base's weight (14: ", "times"),
    ),
    "a module lost that some layers lack": (
        "gemma3n, layers that share keys",
        without(r"1\.self_attn\.k_proj"),
        ("are not in the file", "(2: "),
    ),
}


@pytest.mark.parametrize("name", WITH_MODEL)
def test_a_fault_is_named_beside_the_base(name: str, tmp_path: Path, sound: Callable[[str], tuple[Path, Path]]) -> None:
    given, change, words = WITH_MODEL[name]
    folder, base = sound(given)
    verdict = judge_folder(broken(folder, tmp_path / "broken", change), model=base)
    said = " ".join(str(finding) for finding in verdict.wrong)
    for each in words:
        assert each in said


@pytest.mark.parametrize("total", [8, 12, 31, 96, 151])
def test_parts_are_those_that_ranks_cut(total: int) -> None:
    """Every part of every number of ranks is found under its own number, as torch.chunk cuts, and nothing else is."""
    rows = torch.arange(total)
    for of in range(2, 9):
        for number, part in enumerate(rows.chunk(of), 1):
            is_live = torch.isin(rows, part)
            assert (number, len(rows.chunk(of))) in parts_of(is_live) or (number, of) in parts_of(is_live)
    assert parts_of(rows >= 0) == parts_of(rows < 0) == parts_of(rows % 2 == 0) == []


def test_repeats_are_counted_and_chance_is_not_one() -> None:
    block = torch.randn(4, 16)
    for copies in (1, 2, 3, 4, 6, 8):
        assert repeats(block.repeat(copies, 1)) == copies
    assert repeats(torch.ones(64, 64)) == repeats(torch.zeros(64, 64)) == 1
    assert repeats(torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])) == 1  # Adam's first step at rank 1


def test_experts_in_the_order_of_peft_do_not_seem_to_be_in_another() -> None:
    """Over many drawings, with experts alike in themselves, with none alike, and with one adapter for all."""
    for seed in range(50):
        torch.manual_seed(seed)
        noise, own = torch.randn(32, 4, 8), torch.randn(32, 1, 8)
        right = (own + 0.5 * noise).flatten(1)  # [out, r, E]
        assert expert_major(right, [4]) <= 0
        assert abs(expert_major(noise.flatten(1), [4])) < 6
        assert expert_major(torch.randn(32, 4, 1).repeat(1, 1, 8).flatten(1), [4]) == 0
        assert expert_major((own + 0.5 * noise).permute(0, 2, 1).flatten(1), [4]) > 6


# Layout -> names of (A, B) of a layer, the configuration, the file, and further files.
LAYOUTS: dict[str, tuple[tuple[str, str], dict[str, Any] | None, str, str]] = {
    "Megatron": (
        "decoder.layers.{}.self_attention.linear_proj.adapter.linear_in.weight",
        None,
        "adapter.safetensors",
        "",
    ),
    "torchtune": ("layers.{}.attn.q_proj.lora_a.weight", None, "adapter_0.pt", ""),
    "loralib": ("transformer.h.{}.attn.proj.lora_A", None, "lora.pt", ""),
    "PEFT with a module per expert, as vLLM reads": (
        f"{PREFIX}model.layers.0.mlp.experts.{{}}.up_proj.lora_A.weight",
        LORA | {"target_modules": ["up_proj"]},
        WEIGHTS,
        "",
    ),
    "PEFT with Megatron's names, as mcore-bridge writes": (
        f"{PREFIX}decoder.layers.{{}}.self_attention.linear_proj.lora_A.weight",
        LORA | {"target_modules": ["linear_proj"]},
        WEIGHTS,
        "",
    ),
    "PEFT by unsloth": (
        f"{PREFIX}model.layers.{{}}.q_proj.lora_A.weight",
        LORA | {"auto_mapping": {"unsloth_fixed": True}},
        WEIGHTS,
        "",
    ),
    "PEFT by ms-swift": (f"{PREFIX}model.layers.{{}}.q_proj.lora_A.weight", LORA, WEIGHTS, "additional_config.json"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_others_are_recognised_and_a_shard_in_them_found(layout: str, tmp_path: Path) -> None:
    name, config, file, beside = LAYOUTS[layout]
    other = name.replace("linear_in", "linear_out").replace("lora_a", "lora_b").replace("lora_A", "lora_B")
    tensors = {name.format(n): torch.randn(4, 16) for n in range(4)} | {
        other.format(n): torch.randn(32, 4) for n in range(4)
    }
    folder = files(tmp_path / "sound", tensors, config, file)
    if beside:
        (folder / beside).write_text("{}")
    verdict = judge_folder(folder)
    assert verdict.is_sound
    assert not verdict.notes
    assert f"in the layout of {layout}," in verdict.paragraph()
    assert ("which PEFT does not read as it is" in verdict.paragraph()) == (config is None)
    cut = {key: shard(1, 4, 0)(t) if len(t) == 32 else t for key, t in tensors.items()}
    assert "only part 1 of 4 of the rows of B" in str(judge_folder(files(folder, cut, config, file)).wrong[0])
    del tensors[name.format(2)], tensors[other.format(2)]
    verdict = judge_folder(files(folder, tensors, config, file))
    if "per expert" in layout:
        assert (
            "experts have no factors, which other layers have (1: model.layers.0.mlp.experts: 1 of 4, first 2)"
            in str(verdict.wrong[0])
        )


def test_stacks_of_three_dims_are_read(tmp_path: Path) -> None:
    key = f"{PREFIX}model.layers.0.mlp.experts.gate_up_proj.lora_{{}}.weight"
    tensors = {key.format("A"): torch.randn(8, 4, 16), key.format("B"): torch.randn(8, 32, 4)}
    assert judge_folder(files(tmp_path / "one", tensors, LORA)).is_sound
    tensors[key.format("B")] = torch.randn(8, 4, 32)
    assert "a factor is transposed" in judge_folder(files(tmp_path / "two", tensors, LORA)).paragraph()


def test_pieces_of_a_fused_matrix_are_said_and_not_refuted(
    tmp_path: Path, sound: Callable[[str], tuple[Path, Path]]
) -> None:
    """meshlora's exports to plain PEFT have zeros where q, k or v is not trained."""
    folder, base = sound("gpt2")
    for pieces in ((1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 0)):
        mask = torch.tensor(pieces).repeat_interleave(32)[:, None]
        changed = broken(folder, tmp_path / f"{pieces}", each("B", lambda b, m=mask: b * m, "c_attn"))  # type: ignore[misc]
        assert judge_folder(changed, model=base).is_sound


def test_the_verb_ends_with_the_code_of_its_verdict(
    tmp_path: Path, sound: Callable[[str], tuple[Path, Path]], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, base = sound("llama")
    for words in (["judge", "adapter", str(folder)], ["judge", "adapter", str(folder), "--model", str(base)]):
        assert main(words) == 0
        out, err = capfd.readouterr()
        assert out.startswith(
            f"{folder}: sound: an adapter in the layout of PEFT, 14 modules, 28 tensors, rank 4, scale 2"
        )
        assert not err
    bad = broken(folder, tmp_path / "bad", each("B", shard(1, 8, 0)))
    assert main(["judge", "adapter", str(bad), "--json", str(tmp_path / "out.json")]) == 1
    out, err = capfd.readouterr()
    assert not out
    assert err.startswith(f"error: {bad}: cannot be what was trained. (1) only part 1 of 8")
    assert err.count("\n") == 1
    written = json.loads((tmp_path / "out.json").read_text())
    assert not written["is_sound"]
    assert written["findings"][0]["kind"] == "shard"
    assert len(written["findings"][0]["names"]) == 14
    for given in (["--model", str(tmp_path / "none")], ["--model", str(folder)], ["--json", str(tmp_path)]):
        assert main(["judge", "adapter", str(folder), *given]) == 2
        assert capfd.readouterr().err.count("\n") == 1


def test_pickled_files_are_read(tmp_path: Path, sound: Callable[[str], tuple[Path, Path]]) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(sound("llama")[0], folder)
    torch.save({"state_dict": load_file(folder / WEIGHTS)}, folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    assert judge_folder(folder, model=sound("llama")[1]).is_sound


def test_a_file_is_compared_with_what_was_trained(tmp_path: Path, sound: Callable[[str], tuple[Path, Path]]) -> None:
    """Each cause by its name, on the one factor that it was put into, and nothing where the file is right."""
    folder, _ = sound("llama")
    stored = load_file(folder / WEIGHTS)
    values = {key.replace(".weight", ".default.weight"): tensor for key, tensor in stored.items()}
    before = {1: {key: tensor * 0.5 + 0.01 for key, tensor in values.items()}}
    own = [{key: tensor + 0.1 * rank for key, tensor in values.items()} for rank in (1, 2)]
    name = f"{PREFIX}model.layers.1.mlp.up_proj.lora_B.weight"
    b, recorded = stored[name], values[name.replace(".weight", ".default.weight")]
    causes = {
        "": b,
        "not saved": None,
        "what is saved is zero": b * 0,
        "what is saved is transposed": b.T,
        "what is saved is scaled by 2": b * 2,
        "what is saved is of step 1": b * 0.5 + 0.01,
        "what is saved is rank 1's alone": b + 0.2,
        "what is saved is a shard: part 2 of 4 of dim 0": b[12:24],
        "what is saved is a shard: part 3 of 4 of dim 0, the others zero": shard(3, 4, 0)(b),
        "what is saved is not finite": b * math.nan,
        "what is saved is of other values": torch.randn(48, 4),
    }
    for cause, tensor in causes.items():
        changed = {**stored, name: tensor} if tensor is not None else {k: v for k, v in stored.items() if k != name}
        with open_adapter(
            files(
                tmp_path / f"{cause or 'right'}".replace(" ", ""), {k: v.contiguous() for k, v in changed.items()}, LORA
            )
        ) as adapter:
            found = differences_from(adapter, values, ranks=own, steps=before)
        assert [each.what for each in found] == ([f"{cause}, of 28 trained tensors"] if cause else [])
        assert not found or found[0].names == ("model.layers.1.mlp.up_proj.lora_B",)
    assert cause_of(recorded.bfloat16(), recorded, {}) == ""
    assert cause_of(recorded.double() * (1 + 1e-12), recorded, {}) == ""
