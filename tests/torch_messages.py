"""Pools whose ranks send by torch's own operations, as ranks on GPUs do, here over gloo."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshlora.comm.groups import Axis
from tests.pool import Pool


def over_torch(pool: Pool, folder: Path) -> Pool:
    """`pool`, from now on without direct messages: each of its collectives and messages is torch's. folder: for as long
    as the pool.
    """
    pool.run(_join_gloo, str(folder / f"store-{pool.size}"), pool.size)
    return pool


def _join_gloo(file: str, world: int) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.FileStore(file, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    Axis.is_direct = property(lambda self: False)  # type: ignore[assignment, method-assign]
