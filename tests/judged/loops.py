"""Loops of one's own, right and with a fault: each function is one rank's script, and records two steps.

A loop is what people write: the mean over the step's tokens, on all ranks; clipping; AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import meshlora_judge
from tests.judged.patients import base_of, micro_batches, with_adapter


def train(
    model: Any,
    folder: Path,
    *,
    rank: int = 0,
    world: int = 1,
    fault: str = "",
    averages: bool = True,
    clip: Any = torch.nn.utils.clip_grad_norm_,
    autocast: bool = False,
    **recorded: Any,
) -> None:
    """Two recorded steps of accumulation, clipping and AdamW. averages: the wrapper divides by the ranks."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=1e-4)
    with meshlora_judge.record(model, folder / "seen", steps=2, **recorded):
        for step in range(2):
            batches, total = micro_batches(step, rank, world)
            for place, batch in enumerate(batches):
                is_last = place == len(batches) - 1
                not_synced = fault == "not summed" or (not is_last and hasattr(model, "no_sync"))
                with model.no_sync() if not_synced else nullcontext():
                    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                        if fault == "mean of means":
                            loss = model(**batch).loss / len(batches)
                        else:
                            loss = model(**batch, num_items_in_batch=torch.tensor(total)).loss
                            loss = loss * (world if averages and fault != "averaged twice" else 1)
                    loss.backward()
                if fault == "lost accumulation":
                    for parameter in () if is_last else trained:
                        parameter.grad = None
            clip(trained, 0.05)
            optimizer.step()
            optimizer.zero_grad()


def plain(rank: int, folder: Path, fault: str, changed: Mapping[str, Any]) -> None:
    train(with_adapter(base_of(folder), **changed), folder, fault=fault)


def ddp(rank: int, folder: Path, fault: str) -> None:
    model = DistributedDataParallel(with_adapter(base_of(folder)))
    train(model, folder, rank=rank, world=dist.get_world_size(), fault=fault)


def fsdp2(rank: int, folder: Path, fault: str) -> None:
    """fault "base first": the base is sharded before PEFT adds its factors, which then are nobody's to sum."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base = base_of(folder)
    model = base if fault == "base first" else with_adapter(base)
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if fault == "base first":
        model = with_adapter(model, target_modules=["q_proj", "v_proj"])
    train(model, folder, rank=rank, world=dist.get_world_size(), fault=fault)


def fsdp1(rank: int, folder: Path, fault: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        with_adapter(base_of(folder, torch.float32)), use_orig_params=fault != "flat", device_id=torch.device("cpu")
    )
    train(
        model,
        folder,
        rank=rank,
        world=dist.get_world_size(),
        fault=fault,
        clip=lambda trained, limit: model.clip_grad_norm_(limit),
    )
