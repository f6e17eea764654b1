"""Loading experts on ranks: each reads its own alone, and its memory never holds more than they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import meshlora
from meshlora.comm import groups
from meshlora.loading import load
from meshlora.loading.blueprint import make_blueprint
from meshlora.model import weights
from meshlora.plan.base_options import BaseOptions
from meshlora_ground.topology import Topology, axis_sets
from meshlora_judge.twin import twin_config
from tests.pool import Pool
from tests.ranks.memory import growth_of_peak, in_a_process_of_its_own, model_of_zeros


def _grown_shard_and_largest(folder: Path, name: str) -> tuple[int, int, int]:
    """In a process of its own, which loads one rank's share alone: growth of peak memory, the shard, its largest."""
    topology = Topology.parse(name)

    def axis(ranks: Sequence[int]) -> groups.Axis:
        return groups.Axis(len(ranks), 0, tuple(ranks), None)

    axes = {names: axis(topology.groups_over(names)[0]) for names in axis_sets((), has_experts=True)}
    # Everything but weights is imported and warm before the measurement starts.
    make_blueprint(AutoConfig.from_pretrained(folder), topology, BaseOptions(dtype="float32"))
    with mock.patch.object(load, "open_mesh", return_value=groups.Mesh(topology, 0, torch.device("cpu"), axes)):
        return growth_of_peak(lambda: meshlora.load(folder, topology=topology, dtype="float32"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("stored", "topology"), [pytest.param("float32", "ep=4", marks=pytest.mark.proof), ("bfloat16", "ep=4,etp=2")]
)
def test_a_rank_never_holds_more_than_its_shard_and_one_tensor(stored: str, topology: str, tmp_path: Path) -> None:
    config = twin_config(
        "qwen3_moe",
        hidden_size=512,
        moe_intermediate_size=1024,
        num_experts=32,
        num_hidden_layers=4,
        mlp_only_layers=[],
    )
    model = model_of_zeros(config, getattr(torch, stored))
    whole = 4 * sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path)
    grown, shard, largest = in_a_process_of_its_own(_grown_shard_and_largest, tmp_path, topology)
    bound = shard + largest + 100e6
    assert grown <= bound, f"{grown / 1e6:.0f} MB for a shard of {shard / 1e6:.0f} MB"
    assert bound < whole, "the bound must be able to fail: the whole model is larger"


def _load_counting(folder: Path, topology: str) -> tuple[dict[str, int], dict[str, Tensor], int]:
    """Key -> bytes read of it, the experts that are held, and the rank's place on the axis that splits them."""
    read: dict[str, int] = {}
    original = weights.read_slice

    def counted(stored: weights.StoredTensor, parts: tuple[weights.Part, ...]) -> Tensor:
        value = original(stored, parts)
        read[stored.key] = read.get(stored.key, 0) + value.numel() * value.element_size()
        return value

    with mock.patch.object(weights, "read_slice", counted):
        model = meshlora.load(folder, topology=topology, dtype="float32")
    held = {name: value for name, value in model.state_dict().items() if ".experts." in name}
    return read, held, torch.distributed.get_rank()


@pytest.mark.parametrize("topology", ["ep=2", "dp=2,etp=2"])
def test_each_rank_reads_half_of_the_experts(topology: str, tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    config = twin_config("qwen3_moe")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    stacks = {name: value for name, value in whole.items() if ".experts." in name}
    num_bytes = sum(value.numel() * 4 for value in stacks.values())
    for read, held, rank in pools(2).run(_load_counting, tmp_path, topology):
        of_experts = {key: number for key, number in read.items() if ".experts." in key}
        assert sum(of_experts.values()) == num_bytes // 2
        assert held.keys() == {f"{name}.weight" for name in stacks}
        for name, value in stacks.items():
            if topology == "ep=2":
                part = value.chunk(2)[rank]
            elif name.endswith("down_proj"):
                part = value.chunk(2, 2)[rank]
            else:
                part = torch.cat([half.chunk(2, 1)[rank] for half in value.chunk(2, 1)], 1)
            assert torch.equal(held[f"{name}.weight"], part)
