"""Loading experts on ranks: each reads its own alone, and its memory never holds more than they need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.model import weights
from meshlora.plan.families.twin import twin_config
from tests.pool import Pool

# Loads one rank's share alone in a process of its own and prints, in bytes: growth of peak memory, shard, largest.
_MEASURE = """
import pathlib, sys, torch
import meshlora.loading.load, meshlora.plan.topology as t
from meshlora.loading.blueprint import BaseOptions, make_blueprint
from meshlora.comm import groups
from transformers import AutoConfig

folder, topology = sys.argv[1], t.Topology.parse(sys.argv[2])
axis = lambda ranks: groups.Axis(len(ranks), 0, tuple(ranks), None)
sets = [{n} for n in ("dp", "tp", "edp", "ep", "etp")] + [{"dp", "tp"}]
axes = {frozenset(names): axis(topology.groups_over(names)[0]) for names in sets}
meshlora.loading.load.open_mesh = lambda *_, **__: groups.Mesh(topology, 0, torch.device("cpu"), axes)
# Everything but weights is imported and warm before the measurement starts.
make_blueprint(AutoConfig.from_pretrained(folder), topology, BaseOptions(dtype="float32"))
status = lambda key: int(pathlib.Path("/proc/self/status").read_text().split(key + ":")[1].split()[0]) * 1024
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = status("VmRSS")
model = meshlora.load(folder, topology=topology, dtype="float32")
after = status("VmHWM")
sizes = [p.numel() * p.element_size() for p in model.parameters()]
print(after - before, sum(sizes), max(sizes))
"""


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
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, stored))
    whole = 4 * sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path)
    out = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path), topology], capture_output=True, text=True, check=False
    )
    assert out.returncode == 0, out.stderr
    grown, shard, largest = map(int, out.stdout.split()[-3:])
    bound = shard + largest + 100e6
    assert grown <= bound, f"{grown / 1e6:.0f} MB for a shard of {shard / 1e6:.0f} MB"
    assert bound < whole, "the bound must be able to fail: the whole model is larger"


def _load_counting(folder: Path, topology: str) -> tuple[dict[str, int], dict[str, Tensor], int]:
    """Key -> bytes read of it, the experts that are held, and the rank's place on the axis that splits them."""
    read: dict[str, int] = {}
    original = weights._read_slice

    def counted(stored: weights.StoredTensor, parts: tuple[weights.Part, ...]) -> Tensor:
        value = original(stored, parts)
        read[stored.key] = read.get(stored.key, 0) + value.numel() * value.element_size()
        return value

    with mock.patch.object(weights, "_read_slice", counted):
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
