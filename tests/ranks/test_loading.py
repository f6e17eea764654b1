"""Streaming: peak memory, sharded and single-file checkpoints, tied and renamed weights, random weights."""

from __future__ import annotations

from collections.abc import Callable
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
from meshlora.plan.base_options import BaseOptions
from meshlora_ground.topology import Topology, axis_sets
from meshlora_judge.twin import twin_config
from tests.pool import Pool
from tests.ranks.memory import growth_of_peak, in_a_process_of_its_own, model_of_zeros
from tests.twins import make_batches


def _grown_and_shard(folder: Path, tp: int, dtype: str) -> tuple[int, int]:
    """In a process of its own, which loads one rank's share alone: growth of peak memory, and the shard, in bytes."""

    def axis(size: int) -> groups.Axis:
        return groups.Axis(size, 0, tuple(range(size)), None)

    topology = Topology(tp=tp)
    axes = {names: axis(topology.size_over(names)) for names in axis_sets((), has_experts=False)}
    # Everything but weights is imported and warm before the measurement starts.
    make_blueprint(AutoConfig.from_pretrained(folder), topology, BaseOptions(dtype="float32"))
    with mock.patch.object(load, "open_mesh", return_value=groups.Mesh(topology, 0, torch.device("cpu"), axes)):
        return growth_of_peak(lambda: meshlora.load(folder, topology=topology, dtype=dtype))[:2]


def _save_large(folder: Path, dtype: torch.dtype) -> tuple[Path, int]:
    """173 million weights in shards; returns the folder and the bytes of the largest tensor."""
    config = twin_config(
        "llama", hidden_size=1024, intermediate_size=4096, vocab_size=8000, num_hidden_layers=10, head_dim=128
    )
    model = model_of_zeros(config, dtype)
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size="250MB")
    return folder, largest


@pytest.mark.parametrize(
    ("stored", "loaded", "sizes"),
    [
        pytest.param("float32", "float32", (2, 4), marks=pytest.mark.proof),
        ("bfloat16", "float32", (4,)),  # what is read is not what is kept: the harder of the two
    ],
)
def test_a_rank_never_holds_more_than_its_shard_and_one_tensor(
    stored: str, loaded: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    folder, largest = _save_large(tmp_path, getattr(torch, stored))
    files = list(folder.glob("*.safetensors"))
    assert len(files) > 1
    growth = 2 if stored == "bfloat16" else 1
    largest *= growth
    whole = growth * sum(file.stat().st_size for file in files)
    for tp in sizes:
        grown, shard = in_a_process_of_its_own(_grown_and_shard, folder, tp, loaded)
        assert grown <= shard + largest + 200e6, f"tp={tp}: {grown / 1e6:.0f} MB for a shard of {shard / 1e6:.0f} MB"
    assert shard + largest + 200e6 < whole, "the bound must be able to fail: the whole model is larger"


def _logits(folder: Path, topology: str) -> Tensor:
    model = meshlora.load(folder, topology=topology, dtype="float64").eval()
    with torch.no_grad(), meshlora.lift():
        return model(input_ids=make_batches().input_ids).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["50KB", "1GB"])
def test_checkpoints_sharded_or_not_tied_or_not(
    tied: bool, shard_size: str, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    model = AutoModelForCausalLM.from_config(twin_config("llama", tie_word_embeddings=tied), dtype=torch.float64).eval()
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "50KB")
    with torch.no_grad(), meshlora.lift():
        expected = model(input_ids=make_batches().input_ids).logits
    assert torch.allclose(pools(2).run(_logits, tmp_path, "tp=2")[0], expected, rtol=1e-11, atol=1e-13)


def test_checkpoint_of_the_bare_base_model_is_refused_or_right(tmp_path: Path) -> None:
    """Keys without the `model.` prefix, as saved from the base model class, find their place."""
    model = AutoModelForCausalLM.from_config(twin_config("qwen2", tie_word_embeddings=True), dtype=torch.float64).eval()
    model.model.save_pretrained(tmp_path)
    with torch.no_grad(), meshlora.lift():
        expected = model(input_ids=make_batches().input_ids).logits
    assert torch.allclose(_logits(tmp_path, ""), expected, rtol=1e-11, atol=1e-13)


def _random(topology: str) -> float:
    model = meshlora.load(twin_config("llama"), topology=topology, dtype="float64", seed=5).eval()
    with torch.no_grad(), meshlora.lift():
        return float(model(input_ids=make_batches().input_ids).logits.norm())


def test_random_weights_are_the_same_model_on_every_topology(pools: Callable[[int], Pool]) -> None:
    alone = _random("")
    assert pools(2).run(_random, "tp=2,sp")[0] == pytest.approx(alone, rel=1e-12)
