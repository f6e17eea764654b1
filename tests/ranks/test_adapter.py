"""Adapters across topologies and files: same init, same bytes, same logits in PEFT, several on one model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.adapter.attach import gather_adapter
from meshlora_judge.compare import relative
from tests.pool import Pool
from tests.twins import make_batches, make_twin


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama twin with a PEFT adapter."""
    return make_twin(tmp_path_factory.mktemp("twin"), "llama")


def _fresh(folder: Path, topology: str, init: bool | str) -> dict[str, Tensor]:
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=init)
    model = meshlora.load(folder / "model", lora=lora, topology=topology, seed=7)
    return gather_adapter(model, "default")


@pytest.mark.long
@pytest.mark.parametrize("init", [True, "gaussian", False])
def test_fresh_adapter_has_the_same_bits_on_every_topology(
    init: bool | str, twin: Path, pools: Callable[[int], Pool]
) -> None:
    alone = _fresh(twin, "", init)
    for topology, size in (("tp=2", 2), ("tp=4", 4), ("dp=2,tp=2,sp", 4)):
        for result in pools(size).run(_fresh, twin, topology, init):
            assert result.keys() == alone.keys()
            assert all(torch.equal(result[name], alone[name]) for name in alone)


def test_init_looks_at_the_whole_fan_in_not_the_local_one(twin: Path) -> None:
    a = _fresh(twin, "", True)["model.layers.0.mlp.down_proj.lora_A"]  # row-parallel, 128 inputs
    assert 0.95 / 128**0.5 < float(a.abs().max()) <= 1 / 128**0.5


def test_init_differs_between_layers_and_seeds(twin: Path) -> None:
    first = _fresh(twin, "", True)
    assert not torch.equal(first["model.layers.0.mlp.up_proj.lora_A"], first["model.layers.1.mlp.up_proj.lora_A"])
    lora = LoraConfig(r=4, target_modules="all-linear")
    other = gather_adapter(meshlora.load(twin / "model", lora=lora, seed=8), "default")
    assert not any(torch.equal(first[name], other[name]) for name in first if name.endswith("A"))


def _save_and_logits(folder: Path, out: Path, topology: str) -> Tensor:
    model = meshlora.load(folder / "model", adapter=folder / "adapter", topology=topology, dtype="float64").eval()
    meshlora.save_adapter(model, out)
    with torch.no_grad(), meshlora.lift():
        return model(input_ids=make_batches().input_ids).logits


@pytest.mark.long
@pytest.mark.parametrize(("topology", "size"), [("tp=2,sp", 2), ("tp=4", 4)])
def test_peft_loads_what_we_save_and_gives_our_logits(
    topology: str, size: int, twin: Path, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    ours = pools(size).run(_save_and_logits, twin, tmp_path / "saved", topology)[0]
    base = AutoModelForCausalLM.from_pretrained(twin / "model", dtype=torch.float64)
    peft = PeftModel.from_pretrained(base, str(tmp_path / "saved")).eval()
    with torch.no_grad(), meshlora.lift():
        theirs = peft(input_ids=make_batches().input_ids).logits
    assert relative(ours, theirs) < 1e-11


def test_what_peft_saved_and_we_save_again_is_equal_tensor_by_tensor(
    twin: Path, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    pools(2).run(_save_and_logits, twin, tmp_path / "saved", "tp=2")
    theirs = load_file(twin / "adapter" / "adapter_model.safetensors")
    ours = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def _load_and_save(folder: Path, adapter: Path, out: Path, topology: str) -> None:
    meshlora.save_adapter(meshlora.load(folder / "model", adapter=adapter, topology=topology, dtype="float64"), out)


def test_save_load_save_is_byte_identical(twin: Path, tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    pools(2).run(_load_and_save, twin, twin / "adapter", first, "tp=2,sp")
    pools(4).run(_load_and_save, twin, first, second, "tp=4")
    _load_and_save(twin, second, third, "")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes() == (third / name).read_bytes()


def test_all_linear_is_stored_as_the_names_it_stands_for(twin: Path, tmp_path: Path) -> None:
    model = meshlora.load(twin / "model", lora=LoraConfig(target_modules="all-linear"))
    meshlora.save_adapter(model, tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert stored["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def _several(folder: Path) -> dict[str, Any]:
    model = meshlora.load(folder / "model", adapter=folder / "adapter", topology="tp=2", dtype="float64").eval()
    ids = make_batches().input_ids
    with torch.no_grad():
        first = model(input_ids=ids).logits
        with meshlora.disable_adapter(model):
            base = model(input_ids=ids).logits
        again = model(input_ids=ids).logits
        lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        meshlora.add_adapter(model, "second", lora, seed=3)
        unchanged = model(input_ids=ids).logits
        model.set_adapter("second")
        second = model(input_ids=ids).logits
        meshlora.set_adapter(model, None)
        off = model(input_ids=ids).logits
    model.set_adapter("second")
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    return {
        "first": first, "base": base, "again": again, "unchanged": unchanged, "second": second, "off": off,
        "trainable": trainable,
    }  # fmt: skip


def test_several_adapters_live_on_one_model(twin: Path, pools: Callable[[int], Pool]) -> None:
    seen = pools(2).run(_several, twin)[0]
    assert torch.equal(seen["first"], seen["again"])
    assert torch.equal(seen["first"], seen["unchanged"]), "adding an adapter must not switch to it"
    assert torch.equal(seen["base"], seen["off"])
    for one, other in (("first", "base"), ("second", "base"), ("first", "second")):
        assert relative(seen[one], seen[other]) > 1e-3
    assert len(seen["trainable"]) == 4
    assert all(name.endswith(".second") and "q_proj" in name for name in seen["trainable"])


def test_adapter_of_a_family_with_whole_regions_goes_round(tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    folder = make_twin(tmp_path, "doge")
    _load_and_save(folder, folder / "adapter", tmp_path / "one", "")
    pools(2).run(_load_and_save, folder, folder / "adapter", tmp_path / "two", "tp=2,sp")
    one, two = ((tmp_path / n / "adapter_model.safetensors").read_bytes() for n in ("one", "two"))
    assert one == two


def test_factors_of_a_bf16_base_are_stored_in_fp32(twin: Path, tmp_path: Path) -> None:
    model = meshlora.load(twin / "model", lora=LoraConfig(target_modules=["q_proj"]), dtype="bfloat16")
    meshlora.save_adapter(model, tmp_path / "saved")
    assert {t.dtype for t in load_file(tmp_path / "saved" / "adapter_model.safetensors").values()} == {torch.float32}


def test_transformers_own_adapter_and_save_methods_cannot_hurt(twin: Path, tmp_path: Path) -> None:
    model = meshlora.load(twin / "model", lora=LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(meshlora.UserError, match="save_adapter"):
        model.save_pretrained(tmp_path / "wrong")
    model.add_adapter("more", LoraConfig(target_modules=["v_proj"]))
    assert set(model.meshlora.adapters) == {"default", "more"}


def test_interrupted_save_leaves_the_old_adapter_whole(
    twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = meshlora.load(twin / "model", lora=LoraConfig(target_modules=["q_proj"]))
    meshlora.save_adapter(model, tmp_path / "saved")
    before = (tmp_path / "saved" / "adapter_model.safetensors").read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("meshlora.adapter.formats.peft_format.save_file", fail)
    for target in ("saved", "new"):
        with pytest.raises(meshlora.MeshloraError, match="No space left"):
            meshlora.save_adapter(model, tmp_path / target)
    assert (tmp_path / "saved" / "adapter_model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved"], "no temporary and no half adapter is left"


def test_loading_checks_every_tensor(twin: Path, tmp_path: Path) -> None:
    model = meshlora.load(twin / "model", dtype="float64")
    good = load_file(twin / "adapter" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    damaged = {
        "lacks 1 of": {k: v for k, v in good.items() if k != key},
        "no place": {**good, "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": good[key].clone()},
        "shape": {**good, key: good[key][:, :-1].contiguous()},
        "not finite": {**good, key: torch.full_like(good[key], float("nan"))},
        "type is": {**good, key: good[key].to(torch.int32)},
    }
    for words, tensors in damaged.items():
        folder = tmp_path / words.replace(" ", "-")
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes((twin / "adapter" / "adapter_config.json").read_bytes())
        save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(meshlora.UserError, match=words) as caught:
            meshlora.load_adapter(model, folder)
        assert words == "lacks 1 of" or "layers" in str(caught.value)
        assert not model.meshlora.adapters, "nothing partial is accepted"
