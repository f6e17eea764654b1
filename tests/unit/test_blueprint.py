"""A blueprint is made once, with one build on the meta device, and nothing that is made of it changes it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig

from meshlora.adapter.attach import adapter_factors, add_adapter, set_adapter
from meshlora.adapter.formats.peft_format import save_adapter
from meshlora.loading import blueprint as module
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.run.config.file import read_run
from meshlora.run.run import train
from meshlora.run.together import prepare_run
from meshlora.verify.options import Request
from meshlora.verify.request import prepare_proof
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.unit.mistakes import Setup

LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"])


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a model was built on the meta device."""
    found: Counter[str] = Counter()
    build = module.build_on_meta

    def counted(config: Any, **options: Any) -> Any:
        found[config.model_type] += 1
        return build(config, **options)

    monkeypatch.setattr(module, "build_on_meta", counted)
    return found


def _base(topology: str = "") -> Blueprint:
    return make_blueprint(twin_config("llama"), Topology.parse(topology), BaseOptions(dtype="float64"))


def test_a_run_builds_its_model_once(setup: Setup, builds: Counter[str]) -> None:
    """From its checks to its saved adapter."""
    setup.set("topology", "")
    setup.set("train.steps", 1)
    setup.write()
    train({"": prepare_run(read_run(setup.folder / "run.yaml"), world=1)})
    assert list(builds.values()) == [1]


def test_a_proof_on_several_topologies_builds_its_model_once(builds: Counter[str]) -> None:
    assert len(prepare_proof(Request(("auto",), family="llama", nproc=4)).plans) > 3
    assert builds == {"llama": 1}


def test_another_topology_has_the_plan_that_is_made_for_it() -> None:
    moved, made = _base().with_adapter(LORA).on(Topology.parse("tp=2,sp")), _base("tp=2,sp").with_adapter(LORA)
    assert moved.plan == made.plan
    assert moved.trained.parameters == made.trained.parameters
    assert moved.trained.parameters != _base().with_adapter(LORA).trained.parameters


def test_loading_leaves_the_blueprint_as_it_was() -> None:
    blueprint = _base().with_adapter(LORA)
    names = [name for name, _ in blueprint.model.named_modules()]
    first, second = (load_blueprint(blueprint, device="cpu") for _ in range(2))
    assert [name for name, _ in blueprint.model.named_modules()] == names
    assert all(parameter.is_meta for parameter in blueprint.model.parameters())
    for (name, one), (other_name, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(one, other), name


def test_what_is_trained_is_what_was_planned(tmp_path: Any) -> None:
    """By name, shape and rule: of the first adapter by the blueprint's plan, of a second by one on the loaded model."""
    blueprint = _base().with_adapter(LORA)
    model = load_blueprint(blueprint, device="cpu")
    add_adapter(model, "second", LORA)
    set_adapter(model, "second")
    planned = blueprint.trained.parameters
    for adapter in ("default", "second"):
        factors = {factor.name: factor for factor in adapter_factors(model, adapter)}
        assert {name: (tuple(f.parameter.shape), f.rule) for name, f in factors.items()} == {
            name: (trained.shape, trained.rule) for name, trained in planned.items()
        }
    save_adapter(model, tmp_path / "adapter")
    read = _base().with_folder(tmp_path / "adapter")
    assert read.trained.parameters == planned
    assert read.trained.num_trainable == sum(f.parameter.numel() for f in adapter_factors(model, "second"))
