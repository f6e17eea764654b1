"""Several active adapters and weighted sums of them: what PEFT computes, on meshes, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.adapter.attach import active_factors, runtime
from meshlora_judge.compare import relative
from meshlora_judge.inputs import write_adapter, write_twin
from meshlora_judge.twin import twin_config
from tests.pool import Pool

IDS = torch.tensor([[5, 9, 200, 31, 77, 8], [44, 45, 46, 3, 99, 7]])
# Of other ranks, scales and targets each; two of one rank.
ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj", "embed_tokens"]},
    "b": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "o_proj", "lm_head"], "use_rslora": True},
    "c": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]},
    # Of layers of its own, of which PEFT makes no weighted sum.
    "d": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
}
# name -> arguments of `add_weighted_adapter`.
SUMS: dict[str, tuple[list[str], list[float], str, dict[str, Any]]] = {
    "cat": (["a", "b", "c"], [0.7, -0.4, 1.5], "cat", {}),
    "linear": (["a", "c"], [0.7, -0.4], "linear", {}),
    "svd": (["a", "c"], [0.7, -0.4], "svd", {}),
    "narrow": (["a", "b"], [0.7, 0.3], "svd", {"svd_rank": 3}),
    "alone": (["c"], [-2.0], "cat", {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `model` and an adapter by each name."""
    found = tmp_path_factory.mktemp("sums")
    write_twin(twin_config("llama"), found / "model", dtype=torch.float64, seed=0)
    for number, (name, lora) in enumerate(ADAPTERS.items()):
        write_adapter(found / "model", lora, found / name, seed=number, trust_remote_code=False)
    return found


def _logits(model: Any) -> Tensor:
    with meshlora.lift(), torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def _theirs(folder: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    found = PeftModel.from_pretrained(base, str(folder / "a"), adapter_name="a")
    for name in ("b", "c", "d"):
        found.load_adapter(str(folder / name), name)
    return found.eval()


def _loaded(folder: Path, topology: str = "") -> Any:
    model = meshlora.load(folder / "model", topology=topology).eval()
    for name in ADAPTERS:
        meshlora.load_adapter(model, folder / name, adapter=name)
    return model


def _on_mesh(folder: Path, out: Path, topology: str) -> dict[str, Tensor]:
    """Body of a rank: logits of every sum, each also saved."""
    model = _loaded(folder, topology)
    model.set_adapter(["a", "c", "d", "b"])
    found = {"active": _logits(model)}
    model.set_adapter("a")
    found["a"] = _logits(model)
    for name, (adapters, weights, kind, more) in SUMS.items():
        model.add_weighted_adapter(adapters, weights, name, kind, **more)
        assert model.active_adapters() != [name], "as in PEFT, what is added is not active"
        model.set_adapter(name)
        found[name] = _logits(model)
        meshlora.save_adapter(model, out / name)
    return found


@pytest.mark.parametrize("topology", ["tp=2", pytest.param("tp=2,sp", marks=pytest.mark.proof)])
def test_sums_are_those_of_peft(
    topology: str, folder: Path, tmp_path: Path, pools: Callable[[int], Pool], recwarn: Any
) -> None:
    theirs, expected = _theirs(folder), dict[str, Tensor]()
    theirs.base_model.set_adapter(["a", "c", "d", "b"])
    expected["active"] = _logits(theirs)
    theirs.set_adapter("a")
    expected["a"] = _logits(theirs)
    for name, (adapters, weights, kind, more) in SUMS.items():
        theirs.add_weighted_adapter(adapters, weights, name, kind, **more)
        theirs.set_adapter(name)
        expected[name] = _logits(theirs)
    assert relative(expected["active"], expected["a"]) > 1e-3
    for found in pools(2).run(_on_mesh, folder, tmp_path, topology):
        assert found.keys() == expected.keys()
        for name, logits in found.items():
            assert relative(logits, expected[name]) <= 1e-12, name
    for name in SUMS:
        base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
        read = PeftModel.from_pretrained(base, str(tmp_path / name)).eval()
        assert relative(_logits(read), expected[name]) <= 1e-6, name  # files are in float32


def test_sum_of_active_adapters_is_of_what_they_are_now(folder: Path) -> None:
    model = _loaded(folder)
    model.set_adapter(["a", "b"])
    assert not any(factor.parameter.requires_grad for factor in active_factors(model))
    before = _logits(model)
    model.set_adapter("b")
    with torch.no_grad():
        for factor in active_factors(model):
            factor.parameter.mul_(2)
    assert all(factor.parameter.requires_grad for factor in active_factors(model))
    model.set_adapter(["a", "b"])
    assert relative(_logits(model), before) > 1e-3
    model.set_adapter(["b"])
    assert all(factor.parameter.requires_grad for factor in active_factors(model)), "a list of one is the one"
    assert runtime(model).active == "b"


def test_scale_of_a_sum_is_one_with_rslora_too(folder: Path) -> None:
    """PEFT keeps the root: its sum of adapters whose first has rsLoRA is too large by it."""
    model = _loaded(folder)
    model.set_adapter(["b", "a"])
    found = _logits(model)
    model.set_adapter(["a", "b"])
    assert relative(found, _logits(model)) <= 1e-12


def test_sum_of_adapters_that_begin_otherwise_is_drawn_as_any_other(folder: Path) -> None:
    model = _loaded(folder)
    meshlora.add_adapter(model, "drawn", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian"))
    model.set_adapter(["drawn", "a"])
    found = _logits(model)
    assert runtime(model).adapters["drawn+a"].plan.stored.init_lora_weights is True
    model.set_adapter("a")
    assert relative(found, _logits(model)) <= 1e-12, "a drawn adapter adds nothing yet"


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "unknown": (lambda model: model.set_adapter(["a", "e"]), "adapter 'e': the model has no such adapter"),
    "twice": (lambda model: model.set_adapter(["a", "a"]), "it is one name, or different ones"),
    "none": (lambda model: model.set_adapter([]), "give None for the base alone"),
    "weights": (lambda model: model.add_weighted_adapter(["a"], [1, 2], "x"), "each has one, a finite number"),
    "nan": (lambda model: model.add_weighted_adapter(["a"], [float("nan")], "x"), "each has one, a finite number"),
    "kind": (lambda model: model.add_weighted_adapter(["a", "b"], [1, 2], "x", "tie"), "it is one of cat, linear, svd"),
    "ranks": (lambda model: model.add_weighted_adapter(["a", "b"], [1, 2], "x", "linear"), r"of ranks \[4, 2\]"),
    "rank": (lambda model: model.add_weighted_adapter(["a", "b"], [1, 2], "x", "svd", 0), "a rank is a whole number"),
    "taken": (lambda model: model.add_weighted_adapter(["a", "b"], [1, 2], "c"), "choose another name"),
    "own": (lambda model: model.set_adapter(["a", "own"]), "their sum would be 'a.own', the name of another"),
    "dora": (lambda model: model.set_adapter(["a", "dora"]), "add_weighted_adapter with use_dora"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_sum_is_refused(name: str, folder: Path) -> None:
    model, (act, words) = _loaded(folder), REFUSED[name]
    for own in ("own", "a+own"):
        meshlora.add_adapter(model, own, LoraConfig(r=2, target_modules=["q_proj"]))
    meshlora.add_adapter(model, "dora", LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(meshlora.UserError, match=words):
        act(model)
