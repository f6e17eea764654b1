"""What a split model inherits from transformers does what it does there, or is refused in words of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM
from transformers.integrations import PeftAdapterMixin

import meshlora
from meshlora_ground.errors import UserError
from meshlora_judge.twin import twin_config
from tests.twins import make_twin

QUERY = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
IDS = torch.arange(5, 13)[None]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twin(tmp_path_factory.mktemp("inherited"), "llama")


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad(), meshlora.lift():
        return model(input_ids=IDS).logits  # type: ignore[no-any-return]


def _active(theirs: Any) -> list[str]:
    """What transformers' `active_adapters` reads, which 5.24 has of a PEFT alone that is not there yet (0.22)."""
    layer = next(one for one in theirs.modules() if isinstance(one, LoraLayer))
    return [layer.active_adapter] if isinstance(layer.active_adapter, str) else layer.active_adapter


def _trained(model: Any, ends: str = "") -> list[str]:
    return [name for name, one in model.named_parameters() if one.requires_grad and name.endswith(ends)]


def test_no_method_of_adapters_is_inherited_as_it_is(twin: Path) -> None:
    model = meshlora.load(twin / "model")
    inherited = [name for name, one in vars(PeftAdapterMixin).items() if callable(one) and not name.startswith("_")]
    assert len(inherited) > 5
    assert [name for name in inherited if name not in vars(model)] == []


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # of transformers' second adapter
def test_load_adapter_makes_it_active_as_that_of_transformers(twin: Path, tmp_path: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(twin / "model", dtype=torch.float64)
    other = meshlora.load(twin / "model", lora=QUERY, dtype="float64")
    meshlora.save_adapter(other, tmp_path / "other")
    ours = meshlora.load(twin / "model", dtype="float64").train()
    base = _logits(ours)
    for model in (theirs, ours):
        model.load_adapter(str(twin / "adapter"))
    assert torch.allclose(_logits(ours), _logits(theirs), rtol=1e-9, atol=1e-12)
    assert (_logits(ours) - base).abs().max() > 1e-3
    assert ours.active_adapters() == _active(theirs) == ["default"]
    assert ours.training == theirs.training == bool(_trained(ours))
    for model in (theirs, ours):
        model.load_adapter(str(tmp_path / "other"), adapter_name="more", is_trainable=True)
    assert torch.allclose(_logits(ours), _logits(theirs), rtol=1e-9, atol=1e-12)
    assert ours.active_adapters() == _active(theirs) == ["more"]
    assert _trained(ours) == _trained(ours, ".more") != []


def test_add_adapter_of_transformers_makes_it_active() -> None:
    model = meshlora.load(twin_config("llama"))
    assert model.active_adapters() == []
    model.add_adapter(QUERY)
    assert model.active_adapters() == ["default"]
    model.add_adapter(QUERY, "more")
    assert model.active_adapters() == ["more"]
    model.add_adapter("ours", QUERY)
    assert model.active_adapters() == ["more"]
    model.add_adapter(adapter_config=QUERY, adapter_name="named")
    assert model.active_adapters() == ["named"]
    model.set_adapter(adapter_name="ours")
    assert model.active_adapters() == ["ours"]
    model.set_adapter(["default"])
    assert model.active_adapters() == ["default"]
    assert _trained(model) == _trained(model, ".default") != []


MISTAKES: dict[str, tuple[Callable[[Any], object], str]] = {
    "several": (lambda model: model.set_adapter(["a", "b"]), "adapter 'a': the model has no such adapter"),
    "hotswap": (lambda model: model.load_adapter("folder", hotswap=True), "load_adapter(hotswap=True) on a parallel"),
    "ours": (lambda model: model.load_adapter("folder", adapter="x"), "meshlora.load_adapter(model, folder, adapter="),
    "dict": (
        lambda model: model.add_adapter("x", {"r": 4}),
        "an adapter by dict: adapters are those of peft.LoraConfig",
    ),
    "AdaLora": (lambda model: model.add_adapter(AdaLoraConfig(total_step=9)), "an adapter by AdaLoraConfig"),
    "IA3": (lambda model: model.add_adapter(IA3Config(), "x"), "an adapter by IA3Config"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_they_take_and_a_split_model_does_not_is_said(mistake: str) -> None:
    do, said = MISTAKES[mistake]
    with pytest.raises(UserError) as caught:
        do(meshlora.load(twin_config("llama")))
    assert said in str(caught.value)
