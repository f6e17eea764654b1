"""Adapters on routed experts in files: PEFT's form and the engines', against definitions and against PEFT itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import meshlora
from meshlora.adapter.formats.file_tensors import (
    ExpertFactors,
    from_blocks,
    from_peft,
    peft_keys,
    to_blocks,
    to_peft,
    to_shared,
)
from meshlora.adapter.formats.peft_format import lora_config
from meshlora.wings.experts.per_expert import (
    EngineNames,
    engine_names,
    engine_tensors,
    join_rows,
    read_engine_tensors,
    split_rows,
)
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.float64 import lift
from meshlora_judge.twin import twin_config
from tests.for_each import for_each

E, R, IN, OUT = 4, 3, 5, 7
HIDDEN, INNER = 32, 24
IDS = torch.arange(3, 27).reshape(2, 12)
SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
}
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"intermediate_size": 48, "moe_intermediate_size": INNER, "num_experts": E},
    "gpt_oss": {"intermediate_size": INNER, "num_local_experts": E},
    "mixtral": {"intermediate_size": INNER, "num_local_experts": E},
    "llama4_text": {
        "intermediate_size": INNER,
        "intermediate_size_mlp": 48,
        "num_local_experts": E,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    },
}
CONCATENATED = {"gate": torch.arange(INNER), "up": torch.arange(INNER, 2 * INNER)}
INTERLEAVED = {"gate": torch.arange(0, 2 * INNER, 2), "up": torch.arange(1, 2 * INNER, 2)}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def factors(num_experts: int = E, r: int = R, into: int = IN, out: int = OUT, seed: int = 0) -> ExpertFactors:
    return ExpertFactors(random(num_experts, r, into, seed=seed), random(num_experts, out, r, seed=seed + 1))


def product(adapter: ExpertFactors) -> Tensor:
    """The update `[E, out, in]`."""
    return torch.einsum("eor,eri->eoi", adapter.b, adapter.a)


def equal(one: ExpertFactors, other: ExpertFactors) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def twin(model_type: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **OWN[model_type]})
    experts = {} if model_type == "llama4_text" else {"experts_implementation": "eager"}
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation="eager", **experts
    ).eval()  # fmt: skip


def block(model_type: str) -> str:
    return "feed_forward" if model_type == "llama4_text" else "mlp"


def experts_name(model_type: str, layer: int) -> str:
    return f"model.layers.{layer}.{block(model_type)}.experts"


def logits_of(model: Any) -> Tensor:
    with torch.no_grad(), lift():
        logits: Tensor = model(IDS).logits
    return logits


def assert_same_model(one: Tensor, other: Tensor) -> None:
    """As float64 rounds: the tolerance of design.md §8 for forwards."""
    assert (one - other).norm() <= 1e-11 * one.norm()


def peft_folder(model_type: str, folder: Path, names: list[str]) -> tuple[dict[str, Tensor], Tensor]:
    """An adapter that PEFT saved, with random factors: (its tensors, its logits)."""
    config = LoraConfig(
        r=R, lora_alpha=2 * R, target_modules=[], target_parameters=[f"{block(model_type)}.experts.{n}" for n in names]
    )
    model = get_peft_model(twin(model_type), config)
    for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.data = 0.1 * random(*parameter.shape, seed=index)
    model.save_pretrained(folder)
    return load_file(folder / "adapter_model.safetensors"), logits_of(model)


def of_file(model_type: str, tensors: dict[str, Tensor], layer: int, names: list[str]) -> dict[str, ExpertFactors]:
    keys = peft_keys(experts_name(model_type, layer), names)
    swapped = model_type == "llama4_text"
    return {
        name: from_peft(tensors[keys[name, "A"]], tensors[keys[name, "B"]], num_experts=E, is_swapped=swapped)
        for name in names
    }


def test_peft_form_is_what_its_definition_says() -> None:
    adapter = factors()
    a, b = to_peft(*adapter, num_experts=E)
    assert (a.shape, b.shape) == ((R * E, IN), (OUT, R * E))
    delta = torch.einsum("ore,eri->eoi", b.reshape(OUT, R, E), a.reshape(E, R, IN))
    torch.testing.assert_close(delta, product(adapter), rtol=0, atol=1e-14)
    assert equal(from_peft(a, b, num_experts=E), adapter)


def test_swapped_form_carries_the_output_side_in_a() -> None:
    adapter = factors()
    a, b = to_peft(*adapter, num_experts=E, is_swapped=True)
    assert (a.shape, b.shape) == ((R * E, OUT), (IN, R * E))
    delta = torch.einsum("ire,ero->eio", b.reshape(IN, R, E), a.reshape(E, R, OUT))  # stored as [E, in, out]
    torch.testing.assert_close(delta.mT, product(adapter), rtol=0, atol=1e-14)
    assert equal(from_peft(a, b, num_experts=E, is_swapped=True), adapter)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_shared_adapter_is_repeated_and_comes_back_as_one(is_swapped: bool) -> None:
    adapter = factors(num_experts=1)
    a, b = to_peft(*adapter, num_experts=E, is_swapped=is_swapped)
    full = from_peft(a, b, num_experts=E, is_swapped=is_swapped)
    assert torch.equal(full.a, adapter.a.expand(E, -1, -1))
    assert torch.equal(product(full), product(adapter).expand(E, -1, -1))
    assert equal(to_shared(full, where="file"), adapter)


@pytest.mark.parametrize("side", ["A", "B"])
def test_one_bit_off_is_no_shared_adapter(side: str) -> None:
    a, b = to_peft(*factors(num_experts=1), num_experts=E)
    changed = from_peft(a, b, num_experts=E)
    stack = changed.a if side == "A" else changed.b
    stack[2, 0, 0] = torch.nextafter(stack[2, 0, 0], torch.tensor(9.0, dtype=torch.float64))
    a, b = to_peft(*changed, num_experts=E)
    with pytest.raises(UserError, match=rf"lora_{side} of expert 2 is not that of expert 0.*to the last bit"):
        to_shared(from_peft(a, b, num_experts=E), where="file: experts.down_proj")


def test_only_one_side_may_be_shared() -> None:
    adapter = ExpertFactors(factors(num_experts=1).a, factors().b)
    full = from_peft(*to_peft(*adapter, num_experts=E), num_experts=E)
    assert torch.equal(full.a[3], adapter.a[0])
    assert torch.equal(full.b, adapter.b)
    assert to_shared(ExpertFactors(full.a, full.b[:1]), where="file").a.shape == (1, R, IN)


@pytest.mark.parametrize(
    ("a", "b"),
    [((R * E + 1, HIDDEN), (INNER, R * E + 1)), ((R * E, INNER), (HIDDEN, R * E - E)), ((E, R, INNER), None)],
)
def test_shapes_of_another_number_of_experts_are_refused(
    a: tuple[int, ...], b: tuple[int, ...] | None, tmp_path: Path
) -> None:
    tensors, _ = peft_folder("qwen3_moe", tmp_path, ["down_proj"])
    keys = peft_keys(experts_name("qwen3_moe", 1), ["down_proj"])
    tensors[keys["down_proj", "A"]] = random(*a)
    tensors[keys["down_proj", "B"]] = random(*(b or (HIDDEN, R * E)))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"experts.lora_A.*need \[12, 24\]|experts.lora_B.*need \[32, 12\]"):
        meshlora.load(twin("qwen3_moe").config, adapter=tmp_path)


def test_forms_share_no_memory() -> None:
    adapter = factors(num_experts=1)
    a, b = to_peft(*adapter, num_experts=1)
    back = from_peft(a, b, num_experts=1)
    assert len({t.untyped_storage().data_ptr() for t in (*adapter, a, b, *back)}) == 6
    assert all(t.is_contiguous() for t in (a, b, *back))


@for_each("rows", [CONCATENATED, INTERLEAVED], ids=["concatenated", "interleaved"])
@for_each("pieces", [("gate", "up"), ("up",), ("up", "gate")])
@for_each("num_experts", [1, E])
def test_pieces_as_blocks(rows: dict[str, Tensor], pieces: tuple[str, ...], num_experts: int) -> None:
    own = {name: factors(num_experts, out=INNER, seed=10 * i) for i, name in enumerate(pieces)}
    whole = to_blocks(own, rows=rows, out_features=2 * INNER)
    assert whole.a.shape == (num_experts, R * len(pieces), IN)
    expected = torch.zeros(num_experts, 2 * INNER, IN, dtype=torch.float64)
    for name in pieces:
        expected[:, rows[name]] = product(own[name])
    torch.testing.assert_close(product(whole), expected, rtol=0, atol=1e-13)
    back = from_blocks(whole, pieces=pieces, rows=rows, where="file")
    assert list(back) == list(pieces)
    assert all(equal(back[name], own[name]) for name in pieces)


def test_blocks_that_are_not_zero_outside_are_refused() -> None:
    own = {name: factors(out=INNER, seed=i) for i, name in enumerate(("gate", "up"))}
    whole = to_blocks(own, rows=INTERLEAVED, out_features=2 * INNER)
    whole.b[3, INTERLEAVED["up"][0], 0] = 1e-30
    with pytest.raises(UserError, match=r"not zero outside the pieces \['gate', 'up'\]"):
        from_blocks(whole, pieces=("gate", "up"), rows=INTERLEAVED, where="file")


def test_keys_depend_on_which_parameters_are_targets() -> None:
    layer, start = "model.layers.1.mlp.experts", "base_model.model.model.layers.1.mlp.experts"
    both = peft_keys(layer, ["down_proj", "gate_up_proj"])
    assert both["gate_up_proj", "A"] == f"{start}.base_layer.lora_A.weight"
    assert both["down_proj", "B"] == f"{start}.lora_B.weight"
    assert peft_keys(layer, ["gate_up_proj"]) == {
        ("gate_up_proj", side): f"{start}.lora_{side}.weight" for side in "AB"
    }
    assert len(set(peft_keys(layer, ["up_proj", "down_proj"]).values())) == 4


def test_keys_of_no_target_are_refused(tmp_path: Path) -> None:
    tensors, _ = peft_folder("qwen3_moe", tmp_path, ["gate_up_proj", "down_proj"])
    peft_folder("qwen3_moe", tmp_path, ["down_proj"])
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"4 of its tensors have no place in this model, first .*experts.base_layer"):
        meshlora.load(twin("qwen3_moe").config, adapter=tmp_path)
    elsewhere = {key.replace("layers.1", "layers.7"): t for key, t in tensors.items() if ".base_layer" not in key}
    save_file(elsewhere, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"lacks 2 of 4 tensors, first .*layers.1.mlp.experts.lora_A.*did you mean"):
        meshlora.load(twin("qwen3_moe").config, adapter=tmp_path)


@for_each("model_type", ["qwen3_moe", "gpt_oss", "llama4_text"])
@for_each("names", [["gate_up_proj", "down_proj"], ["gate_up_proj"], ["down_proj"]], ids="+".join)
def test_files_of_peft(model_type: str, names: list[str], tmp_path: Path) -> None:
    tensors, logits = peft_folder(model_type, tmp_path / "adapter", names)
    model, rewritten = twin(model_type), {}
    for layer in (0, 1):
        adapters = of_file(model_type, tensors, layer, names)
        keys = peft_keys(experts_name(model_type, layer), names)
        for name, adapter in adapters.items():
            widths = {"gate_up_proj": (HIDDEN, 2 * INNER), "down_proj": (INNER, HIDDEN)}[name]
            assert (adapter.a.shape[2], adapter.b.shape[1]) == widths
            stored = model.get_parameter(f"{experts_name(model_type, layer)}.{name}")
            update = 2 * product(adapter)  # lora_alpha / r
            stored.data += update if model_type == "qwen3_moe" else update.mT
            sides = to_peft(*adapter, num_experts=E, is_swapped=model_type == "llama4_text")
            rewritten |= {keys[name, side]: tensor for side, tensor in zip("AB", sides, strict=True)}
    assert rewritten.keys() == tensors.keys()
    assert all(torch.equal(rewritten[key], tensors[key]) for key in tensors)
    assert (logits_of(twin(model_type)) - logits).norm() > 1e-3 * logits.norm()
    assert_same_model(logits_of(model), logits)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_peft_reads_what_we_write(model_type: str, tmp_path: Path) -> None:
    """A shared adapter on gate alone and one on down, in PEFT's form, against the update written into the weights."""
    rows = INTERLEAVED if model_type == "gpt_oss" else CONCATENATED
    names = ["gate_up_proj", "down_proj"]
    tensors, _ = peft_folder(model_type, tmp_path / "adapter", names)
    model = twin(model_type)
    for layer in (0, 1):
        gate = ExpertFactors(*(0.1 * x for x in factors(1, into=HIDDEN, out=INNER, seed=layer)))
        down = ExpertFactors(*(0.1 * x for x in factors(into=INNER, out=HIDDEN, seed=layer)))
        first = to_blocks({"gate": gate}, rows=rows, out_features=2 * INNER)
        keys = peft_keys(experts_name(model_type, layer), names)
        for name, adapter in (("gate_up_proj", first), ("down_proj", down)):
            sides = to_peft(*adapter, num_experts=E)
            tensors |= {keys[name, side]: tensor for side, tensor in zip("AB", sides, strict=True)}
            update = 2 * product(adapter)
            stored = model.get_parameter(f"{experts_name(model_type, layer)}.{name}")
            stored.data += update.mT if model_type == "gpt_oss" else update
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    assert_same_model(logits_of(PeftModel.from_pretrained(twin(model_type), tmp_path / "adapter")), logits_of(model))


@pytest.mark.parametrize("rows", [CONCATENATED, INTERLEAVED], ids=["concatenated", "interleaved"])
@pytest.mark.parametrize("num_experts", [1, E])
def test_rows_of_one_adapter_split_and_joined(rows: dict[str, Tensor], num_experts: int) -> None:
    fused = factors(num_experts, out=2 * INNER)
    split = split_rows(fused, rows=rows)
    torch.testing.assert_close(product(split["up"]), product(fused)[:, rows["up"]], rtol=0, atol=1e-14)
    joined = join_rows(split, rows=rows)
    assert joined is not None
    assert equal(joined, fused)
    apart = {**split, "up": ExpertFactors(split["up"].a + 1e-9, split["up"].b)}
    assert join_rows(apart, rows=rows) is None
    assert join_rows({"gate": split["gate"]}, rows=rows) is None


@pytest.mark.parametrize(
    ("model_type", "start"),
    [
        ("qwen3_moe", "base_model.model.model.layers.1.mlp.experts.2.gate_proj"),
        ("mixtral", "base_model.model.model.layers.1.block_sparse_moe.experts.2.w1"),
    ],
)
def test_engine_keys_and_back(model_type: str, start: str) -> None:
    names, experts = engine_names(model_type), "model.layers.1.mlp.experts"
    own = split_rows(factors(into=HIDDEN, out=2 * INNER), rows=CONCATENATED)
    own["down"] = factors(into=INNER, out=HIDDEN)
    tensors = engine_tensors(experts, own, num_experts=E, names=names)
    assert len(tensors) == E * 3 * 2
    assert torch.equal(tensors[f"{start}.lora_A.weight"], own["gate"].a[2])
    assert torch.equal(tensors[f"{start}.lora_B.weight"], own["gate"].b[2])
    assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == len(tensors)  # what safetensors asks for
    back = read_engine_tensors({**tensors, "another": random(1)}, experts, num_experts=E, names=names, where="file")
    assert list(back) == ["gate", "up", "down"]
    assert all(equal(back[name], own[name]) for name in own)
    joined = join_rows(back, rows=CONCATENATED)
    assert joined is not None
    assert equal(joined, factors(into=HIDDEN, out=2 * INNER))


def test_more_than_ten_experts_keep_their_order() -> None:
    """As text 10 comes before 2."""
    names, experts, own = engine_names("olmoe"), "model.layers.0.mlp.experts", {"up": factors(12)}
    tensors = engine_tensors(experts, own, num_experts=12, names=names)
    for e in range(12):
        assert torch.equal(tensors[f"base_model.model.{experts}.{e}.up_proj.lora_A.weight"], own["up"].a[e])
    assert equal(read_engine_tensors(tensors, experts, num_experts=12, names=names, where="file")["up"], own["up"])


def test_fresh_adapter_comes_back_from_engines() -> None:
    """B is zero: it adds nothing yet, and A is what training goes on from."""
    names, experts = engine_names("olmoe"), "model.layers.0.mlp.experts"
    a, b = factors()
    tensors = engine_tensors(experts, {"up": ExpertFactors(a, b.zero_())}, num_experts=E, names=names)
    back = read_engine_tensors(tensors, experts, num_experts=E, names=names, where="file")
    assert list(back) == ["up"]
    assert torch.equal(back["up"].a, a)


@pytest.mark.parametrize("given", ["gate", "up", "down"])
def test_engines_get_zeros_where_there_is_no_adapter(given: str) -> None:
    names, experts = engine_names("olmoe"), "model.layers.0.mlp.experts"
    into, out = (INNER, HIDDEN) if given == "down" else (HIDDEN, INNER)
    adapter = factors(1, into=into, out=out)
    tensors = engine_tensors(experts, {given: adapter}, num_experts=E, names=names)
    shapes = {key.split(".")[-3] + key.split(".")[-2][-1]: tuple(t.shape) for key, t in tensors.items()}
    assert shapes == {
        "gate_projA": (R, HIDDEN),
        "gate_projB": (INNER, R),
        "up_projA": (R, HIDDEN),
        "up_projB": (INNER, R),
        "down_projA": (R, INNER),
        "down_projB": (HIDDEN, R),
    }
    back = read_engine_tensors(tensors, experts, num_experts=E, names=names, where="file")
    assert list(back) == [given]
    assert equal(to_shared(back[given], where="file"), adapter)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_peft_reads_the_engine_form_as_the_same_model(model_type: str, tmp_path: Path) -> None:
    """PEFT itself turns files with one adapter for each expert into its fused form, where it knows the family."""
    tensors, logits = peft_folder(model_type, tmp_path / "fused", ["gate_up_proj", "down_proj"])
    names, exported = engine_names(model_type), {}
    for layer in (0, 1):
        adapters = of_file(model_type, tensors, layer, ["gate_up_proj", "down_proj"])
        own = {**split_rows(adapters["gate_up_proj"], rows=CONCATENATED), "down": adapters["down_proj"]}
        exported |= engine_tensors(experts_name(model_type, layer), own, num_experts=E, names=names)
    folder = tmp_path / "engine"
    LoraConfig(r=R, lora_alpha=2 * R, target_modules=list(names.projections.values())).save_pretrained(folder)
    save_file(exported, folder / "adapter_model.safetensors")
    with pytest.warns(RuntimeWarning, match="did not match any targeted module"):  # wrong: PEFT follows both
        model = PeftModel.from_pretrained(twin(model_type), folder)
    assert_same_model(logits_of(model), logits)


def test_engine_files_with_holes_are_refused() -> None:
    names, experts = EngineNames(), "model.layers.0.mlp.experts"
    own = {"down": factors(into=INNER, out=HIDDEN)}
    tensors = engine_tensors(experts, own, num_experts=E, names=names)
    key = f"base_model.model.{experts}.3.down_proj.lora_B.weight"

    def refused(changed: dict[str, Tensor], match: str, num_experts: int = E) -> None:
        with pytest.raises(UserError, match=match):
            read_engine_tensors(changed, experts, num_experts=num_experts, names=names, where="file")

    refused({k: t for k, t in tensors.items() if k != key}, "lacks 1 of 4 experts' factors, first .*3.down_proj.lora_B")
    refused({**tensors, key: random(HIDDEN, R + 1)}, "all experts of a layer have one shape")
    refused(tensors, "experts.3.*has 3 experts with gate_proj, up_proj, down_proj", num_experts=3)
    refused({**tensors, key.replace("down_proj", "w2"): random(1)}, "3.w2.lora_B.*it belongs to another model")
    swapped = {k: t.mT for k, t in tensors.items()}
    refused(swapped, r"they are \[r, in\] and \[out, r\]")


def test_engine_names_say_what_is_not_known() -> None:
    with pytest.raises(UnsupportedError, match="serve the adapter as it is"):
        engine_names("gpt_oss")
    with pytest.raises(UnsupportedError, match="not known what serving engines call its projections; known: deepseek"):
        engine_names("granitemoe")
    assert list(engine_names("nemotron_h").projections) == ["up", "down"]


def test_an_adapter_that_experts_share_is_read_back_as_such(tmp_path: Path) -> None:
    given = {"r": 2, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "share_experts": True}
    model = meshlora.load(twin_config("qwen3_moe"), lora=lora_config(given, "lora"))
    meshlora.save_adapter(model, tmp_path / "adapter")
    again = meshlora.load(twin_config("qwen3_moe"), adapter=tmp_path / "adapter")
    first, second = (one.meshlora.adapters["default"].plan for one in (model, again))
    assert second.stored.share_experts
    assert second.targets == first.targets
