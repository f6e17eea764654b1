"""Ranks of one tp group that are given different rows: an error on all of them, in the first forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import meshlora
from meshlora.wings.experts.same_tokens import COMPARED_FORWARDS
from meshlora_judge.twin import twin_config
from tests.for_each import for_each
from tests.pool import Pool


def _load(topology: str) -> Any:
    return meshlora.load(twin_config("llama"), lora=LoraConfig(r=4, target_modules="all-linear"), topology=topology)


def _rows(seed: int, *shape: int) -> Tensor:
    return torch.randint(3, 200, shape, generator=torch.Generator().manual_seed(seed))


# What rank `rank` gives its model, after `COMPARED_FORWARDS - 1` batches that are the same everywhere.
BATCHES: dict[str, Callable[[int], dict[str, Tensor]]] = {
    "other rows": lambda rank: {"input_ids": _rows(rank, 2, 8)},
    "the same rows in another order": lambda rank: {"input_ids": _rows(0, 2, 8).roll(rank, 0)},
    "longer rows": lambda rank: {"input_ids": _rows(0, 2, 8 + 2 * rank)},
    "the same tokens as other rows": lambda rank: {"input_ids": _rows(0, 16).view(2 + 2 * rank, -1)},
    "other embeddings": lambda rank: {"inputs_embeds": _rows(rank, 2, 8, 64) / 200},
}


def _forward(topology: str, name: str, trains: bool) -> str:
    model = _load(topology)
    mesh = model.meshlora.mesh
    with torch.set_grad_enabled(trains):
        for seed in range(COMPARED_FORWARDS - 1):
            model(input_ids=_rows(seed, 2, 8))
        with pytest.raises(meshlora.UserError) as refused:
            model(**BATCHES[name](mesh.rank))
    return str(refused.value)


@for_each("trains", [True, False], ids=["training", "evaluation"])
@for_each("name", BATCHES)
def test_tp_ranks_that_see_different_tokens_would_mix_them(
    name: str, trains: bool, pools: Callable[[int], Pool]
) -> None:
    for message in pools(2).run(_forward, "tp=2", name, trains):
        assert "tp ranks see different tokens" in message
        assert "rank 0, " in message
        assert "num_replicas=mesh.dp.size" in message
    assert "2 rows of 8 on rank 0, 2 rows of 10 on rank 1" in message or name != "longer rows"


def _shared_by_dp_rank() -> list[float]:
    model = _load("dp=2,tp=2")
    mesh = model.meshlora.mesh
    return [float(model(_rows(10 * step + mesh.dp.rank, 2, 8)).logits.sum()) for step in range(3)]


def test_dp_ranks_have_rows_of_their_own(pools: Callable[[int], Pool]) -> None:
    first, second, third, fourth = pools(4).run(_shared_by_dp_rank)
    assert first == second
    assert third == fourth
    assert first != third
