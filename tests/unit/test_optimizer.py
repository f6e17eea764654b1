"""Which parameters are decayed, against the rule of transformers' Trainer on PEFT's model, and by the step itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer

from meshlora.adapter.attach import active_factors
from meshlora.run.checkpoint.state import restore_optimizer, state_writer
from meshlora.run.config.run_file import TrainConfig
from meshlora.run.optimizer import make_optimizer, parameter_groups
from meshlora_ground.topology import Topology
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from tests.blueprints import load_without_proof

DECAY, LR = 0.1, 0.5
LORA: dict[str, dict[str, Any]] = {
    "gpt2": {"target_modules": ["c_attn", "c_fc"], "bias": "lora_only", "modules_to_save": ["ln_1", "ln_f"]},
    "llama": {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["norm"], "use_dora": True},
    "qwen2": {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"},
}


@pytest.fixture(scope="module", params=LORA)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """(family, its twin with an adapter that trains more than linears)."""
    folder: Path = tmp_path_factory.mktemp("twin")
    write_twin(twin_config(request.param), folder, dtype=torch.float64, seed=0)
    lora = LoraConfig(r=4, lora_alpha=8, **LORA[request.param])
    return request.param, load_without_proof(folder, lora=lora, topology=Topology(), dtype="float64")


def step_without_gradient(model: Any, **settings: Any) -> dict[str, float]:
    """Name -> the share of a trained parameter that one step of AdamW, all gradients zero, takes away."""
    options = TrainConfig(output="out", steps=1, lr=LR, weight_decay=DECAY, **settings)
    groups = parameter_groups(model, options)
    for group in groups:
        group["lr"] = LR * group.pop("times_lr")
    factors = active_factors(model)
    for factor in factors:
        factor.parameter.data.fill_(1.0)
        factor.parameter.grad = torch.zeros_like(factor.parameter)
    torch.optim.AdamW(groups, weight_decay=DECAY).step()
    return {factor.name: 1.0 - float(factor.parameter.detach().mean()) for factor in factors}


def without_decay_in_transformers(family: str) -> set[str]:
    """Trained parameters that `Trainer` leaves without weight decay, under our names."""
    network = AutoModelForCausalLM.from_config(twin_config(family))
    peft = get_peft_model(network, LoraConfig(r=4, fan_in_fan_out=family == "gpt2", **LORA[family]))
    decayed = set(Trainer.get_decay_parameter_names(None, peft))  # type: ignore[arg-type]
    names = {name for name, p in peft.named_parameters() if p.requires_grad} - decayed
    plain = {".base_layer": "", ".modules_to_save.default": "", "base_model.model.": ""}
    for old, new in plain.items():
        names = {name.replace(old, new) for name in names}
    # Trainer takes the factors of a module that is called "norm" for norms; there are none here.
    return {name for name in names if ".lora_" not in name}


def test_all_is_decayed_unless_asked_otherwise(model: tuple[str, Any]) -> None:
    shares = step_without_gradient(model[1])
    assert shares == pytest.approx(dict.fromkeys(shares, LR * DECAY), rel=1e-12)


def test_adam_has_the_constants_of_the_run_file(model: tuple[str, Any]) -> None:
    """A proof gives both of its sides the same ones, whatever has become of them."""
    options = TrainConfig(output="out", steps=1, beta1=0.8, beta2=0.7, eps=0.01)
    optimizer = make_optimizer(model[1], parameter_groups(model[1], options), options)
    assert [(group["betas"], group["eps"]) for group in optimizer.param_groups] == [((0.8, 0.7), 0.01)]


def test_biases_and_norms_are_left_out_as_in_transformers(model: tuple[str, Any]) -> None:
    family, network = model
    shares = step_without_gradient(network, decay_biases_and_norms=False)
    kept = without_decay_in_transformers(family)
    assert kept
    assert {name for name, share in shares.items() if share == 0} == kept
    assert shares == pytest.approx({name: 0.0 if name in kept else LR * DECAY for name in shares}, rel=1e-12)


def test_biases_and_norms_are_left_out_beside_lora_plus(model: tuple[str, Any]) -> None:
    family, network = model
    shares = step_without_gradient(network, decay_biases_and_norms=False, lora_plus_ratio=4.0)
    kept = without_decay_in_transformers(family)
    assert {name for name, share in shares.items() if share == 0} == kept
    for name, share in shares.items():
        if name not in kept:
            times = 1.0 if ".lora_A" in name else 4.0
            assert share == pytest.approx(LR * DECAY * times, rel=1e-12), name


def test_embedding_has_its_own_rate_beside_lora_plus(tmp_path: Path) -> None:
    write_twin(twin_config("llama"), tmp_path, dtype=torch.float64, seed=0)
    lora = LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"])
    network = load_without_proof(tmp_path, lora=lora, topology=Topology(), dtype="float64")
    shares = step_without_gradient(network, lora_plus_ratio=4.0, lora_plus_embedding_lr=1e-4)
    of_embedding = {name: share for name, share in shares.items() if ".lora_embedding_" in name}
    assert len(of_embedding) == 2
    assert of_embedding == pytest.approx(dict.fromkeys(of_embedding, 1e-4 * DECAY), rel=1e-9)


def test_steps_that_were_left_out_are_none_of_adams_after_a_resume(model: tuple[str, Any], tmp_path: Path) -> None:
    """Its bias correction counts updates: 2 of 5 steps here."""
    network = model[1]
    factors = active_factors(network)
    optimizer = torch.optim.AdamW([factor.parameter for factor in factors])
    for factor in factors:
        factor.parameter.grad = torch.ones_like(factor.parameter)
    optimizer.step()
    state_writer(network, optimizer)(tmp_path)
    again = torch.optim.AdamW([factor.parameter for factor in factors])
    restore_optimizer(network, again, SimpleNamespace(folder=tmp_path, step=5, updates=2))  # type: ignore[arg-type]
    assert {float(state["step"]) for state in again.state.values()} == {2.0}
    for factor in factors:
        assert torch.equal(again.state[factor.parameter]["exp_avg"], optimizer.state[factor.parameter]["exp_avg"])
