"""What others would wrap around a divided model is refused by name, on every rank, before it communicates."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import meshlora
from meshlora_judge.twin import twin_config
from tests.for_each import for_each
from tests.pool import Pool

LORA = LoraConfig(r=4, target_modules="all-linear")
ROWS = [{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6]}] * 4


def _accelerate(model: Any) -> None:
    from accelerate import Accelerator

    Accelerator(cpu=True).prepare(model)


def _trainer(model: Any, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    options = {"output_dir": "unused", "max_steps": 1, "save_strategy": "no", "disable_tqdm": True, **options}
    return Trainer(model, TrainingArguments(use_cpu=True, report_to=[], **options), train_dataset=ROWS)  # type: ignore[arg-type]


def _deepspeed(model: Any) -> None:
    """It is not among what tests install: of its `initialize` this has what its engine does before it broadcasts."""
    module = types.ModuleType("deepspeed")
    exec("def initialize(model):\n    return list(model.named_parameters())", vars(module))
    module.initialize(model)  # type: ignore[attr-defined]


# What is wrapped -> by whom, and the name in the message.
WRAPPERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "ddp": (DistributedDataParallel, "torch.nn.parallel.DistributedDataParallel"),
    "ddp of a module around": (lambda m: DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), m)), "DistributedData"),
    "ddp of a layer": (lambda m: DistributedDataParallel(m.model.layers[0]), "DistributedDataParallel"),
    "data parallel": (lambda m: nn.DataParallel(m)(input_ids=torch.ones(1, 4).long()), "torch.nn.DataParallel"),
    "fsdp": (FullyShardedDataParallel, "torch.distributed.fsdp.FullyShardedDataParallel"),
    "fully_shard": (fully_shard, "torch's fully_shard"),
    "fully_shard of layers": (lambda m: [fully_shard(layer) for layer in m.model.layers], "torch's fully_shard"),
    "accelerate": (_accelerate, "accelerate.Accelerator.prepare"),
    "trainer": (_trainer, "transformers.Trainer"),
    "trainer told of unused": (lambda m: _trainer(m, ddp_find_unused_parameters=False), "transformers.Trainer"),
    "deepspeed": (_deepspeed, "deepspeed.initialize"),
}


def _here(model: Any) -> dict[str, torch.Tensor]:
    """What this rank holds: of a tensor that is sharded its own part."""
    return {key: getattr(tensor, "_local_tensor", tensor) for key, tensor in model.state_dict().items()}


def _wrap(topology: str, name: str) -> tuple[str, bool]:
    """(the message, whether this rank still has what it had)."""
    model = meshlora.load(twin_config("llama"), lora=LORA, topology=topology)
    before = {key: tensor.clone() for key, tensor in _here(model).items()}
    rank = str(model.meshlora.mesh.rank)
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, launched), pytest.raises(meshlora.UserError) as refused:
        WRAPPERS[name][0](model)
    after = _here(model)
    return str(refused.value), all(torch.equal(tensor, after[key]) for key, tensor in before.items())


@pytest.mark.long
@for_each(("topology", "name"), [*(("tp=2", name) for name in WRAPPERS), ("dp=2", "ddp"), ("dp=2,dp_shard", "trainer")])
def test_wrapper_would_overwrite_the_parts_of_other_ranks(
    topology: str, name: str, pools: Callable[[int], Pool]
) -> None:
    for message, is_whole in pools(2).run(_wrap, topology, name):
        assert f"{WRAPPERS[name][1]}" in message
        assert f"around a model on {meshlora.Topology.parse(topology, world=2)}" in message
        assert "meshlora train" in message
        assert is_whole


def test_wrappers_of_one_process_are_left_alone(tmp_path: Path) -> None:
    model = meshlora.load(twin_config("llama"), lora=LORA)
    assert _trainer(model, output_dir=str(tmp_path)).train().global_step == 1
