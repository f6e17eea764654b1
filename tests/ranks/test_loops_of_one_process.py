"""A loop written for one process is refused on a mesh, where it would train another adapter without an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

import meshlora
from meshlora.adapter.attach import active_factors
from meshlora_judge.twin import twin_config
from tests.pool import Pool

IDS = torch.randint(3, 200, (2, 8), generator=torch.Generator().manual_seed(0))
TOPOLOGIES = ["tp=2", "cp=2", "dp=2,dp_shard"]


def _twin(topology: str) -> tuple[Any, torch.optim.Optimizer]:
    lora = LoraConfig(r=2, target_modules="all-linear")
    model = meshlora.load(twin_config("llama"), lora=lora, topology=topology).train()
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _loss(model: Any, **options: Any) -> torch.Tensor:
    return model(input_ids=IDS, labels=IDS, **options).loss  # type: ignore[no-any-return]


def _said(do: Callable[[], object]) -> str:
    try:
        do()
    except meshlora.MeshloraError as error:
        return str(error)
    return "nothing"


def _mistakes(topology: str) -> dict[str, str]:
    """Body of a rank: what is said of each update that one process would make, none of which is made."""
    model, optimizer = _twin(topology)
    start = [factor.parameter.detach().clone() for factor in active_factors(model)]

    def bare() -> None:
        _loss(model, num_items_in_batch=14).backward()
        optimizer.step()

    def inside() -> None:
        with meshlora.step(model, optimizer) as step:
            step.backward(_loss(model))
            optimizer.step()

    def rates() -> None:
        optimizer.param_groups[0]["lr"] = 0.1 if model.meshlora.mesh.rank else 0.2
        with meshlora.step(model, optimizer) as step:
            step.backward(_loss(model))

    said = {}
    for mistake in (bare, inside, rates):
        said[mistake.__name__] = _said(mistake)
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1
    for factor, before in zip(active_factors(model), start, strict=True):
        assert torch.equal(factor.parameter, before), factor.name
    with meshlora.step(model, optimizer) as step:  # a right one goes on
        step.backward(_loss(model))
    _loss(model, num_items_in_batch=1).backward()
    meshlora.finish_gradients(model, num_tokens=14)
    optimizer.step()
    return said


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_an_update_by_gradients_of_one_rank_is_refused(topology: str, pools: Callable[[int], Pool]) -> None:
    for said in pools(2).run(_mistakes, topology):
        for name in ("bare", "inside"):
            assert said[name].startswith("optimizer.step() on the gradient of "), said
            assert "meshlora.step" in said[name]
        assert said["rates"].startswith("learning rates that differ: 0.2 on rank 0, 0.1 on rank 1"), said


def _drifted(topology: str, folder: Path) -> tuple[str, bool]:
    model, _ = _twin(topology)
    meshlora.save_adapter(model, folder / "equal")
    if model.meshlora.mesh.rank == 1:
        with torch.no_grad():
            for factor in active_factors(model):
                factor.parameter.add_(1e-3)
    return _said(lambda: meshlora.save_adapter(model, folder / "other")), (folder / "other").exists()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_factors_that_one_rank_has_changed_are_not_saved(
    topology: str, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    for said, is_saved in pools(2).run(_drifted, topology, tmp_path):
        assert "must be the same to the bit over" in said, said
        assert not is_saved


CALLS: dict[str, Callable[[Any], object]] = {
    "resize_token_embeddings": lambda model: model.resize_token_embeddings(300),
    "save_pretrained": lambda model: model.save_pretrained("never"),
    "half": lambda model: model.half(),
    "compile": lambda model: model.compile(),
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "compile of a layer": lambda model: model.model.layers[0].compile(backend="eager"),
    "torch.compile of a layer": lambda model: torch.compile(model.model.layers[0], backend="eager"),
    "delete_adapter": lambda model: model.delete_adapter("default"),
    "enable_adapters": lambda model: model.enable_adapters(),
    "disable_adapters": lambda model: model.disable_adapters(),
    "enable_peft_hotswap": lambda model: model.enable_peft_hotswap(),
    "get_adapter_state_dict": lambda model: model.get_adapter_state_dict(),
    "__deepcopy__": copy.deepcopy,
    "__reduce_ex__": pickle.dumps,
}


def _calls(topology: str) -> dict[str, str]:
    model, _ = _twin(topology)
    return {name: _said(lambda call=call: call(model)) for name, call in CALLS.items()}  # type: ignore[misc]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_what_knows_nothing_of_the_mesh_is_refused_by_name(topology: str, pools: Callable[[int], Pool]) -> None:
    for said in pools(2).run(_calls, topology):
        for name, words in said.items():
            assert words.startswith(f"{name.removesuffix(' of a layer')} on a parallel model: "), said
