"""Adapter folders with factors of single experts load on any topology as their fused form does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import meshlora
from meshlora.adapter.attach import gather_adapter
from meshlora_extra.engine_export import export_per_expert
from meshlora_ground.topology import Topology
from tests.blueprints import load_without_proof
from tests.pool import Pool
from tests.unit.engine_adapters import KINDS, WEIGHTS, meta, twin
from tests.unit.test_expert_format import IDS


def _loaded(model: Path, adapter: Path, topology: str, out: Path) -> tuple[dict[str, Tensor], Tensor]:
    loaded = load_without_proof(model, adapter=adapter, topology=Topology.parse(topology), dtype="float64").eval()
    meshlora.save_adapter(loaded, out)
    with torch.no_grad(), meshlora.lift():
        return gather_adapter(loaded, "default"), loaded(input_ids=IDS).logits


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.proof) for kind in ("qwen3_moe", "gate_and_up", "shared")),
        *("mixtral", "up", "dense_and_shared_experts"),
    ],
)
def test_both_forms_are_one_adapter_on_every_topology(kind: str, tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    family, make = KINDS[kind]
    model, adapter = tmp_path / "model", make(tmp_path / "adapter")
    twin(family).save_pretrained(model)
    export_per_expert(adapter, tmp_path / "engine", **meta(model))
    fused, logits = _loaded(model, adapter, "", tmp_path / "of_fused")
    saved = load_file(tmp_path / "of_fused" / WEIGHTS)
    topologies = [("dp=2,ep=2", 2), ("tp=2,etp=2", 2)]
    results = [_loaded(model, tmp_path / "engine", "", tmp_path / "saved")]
    for topology, size in topologies:
        results += pools(size).run(_loaded, model, tmp_path / "engine", topology, tmp_path / f"on_{topology}")
    for factors, own in results:
        assert factors.keys() == fused.keys()
        assert all(torch.equal(factors[name], fused[name]) for name in fused)
        assert (own - logits).norm() <= 1e-11 * logits.norm()
    for name in ("saved", *(f"on_{topology}" for topology, _ in topologies)):
        again = load_file(tmp_path / name / WEIGHTS)
        assert again.keys() == saved.keys()
        assert all(torch.equal(again[key], saved[key]) for key in saved)
        own_file = [(tmp_path / folder / "meshlora.json").is_file() for folder in (name, "of_fused")]
        assert own_file[0] == own_file[1]
