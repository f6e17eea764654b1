"""PEFT's `save_pretrained` inside FSDP1 without gathering: a rank's file has flat pieces, and tensors of no element."""

from __future__ import annotations

from pathlib import Path

import torch
from common import base_model, collated, rows, run, trained_of, with_adapter
from torch.distributed.fsdp import FullyShardedDataParallel


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    model = with_adapter(base_model(folder))
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-3)
    model.train()
    model(**collated(rows()[rank::2])).loss.backward()
    optimizer.step()
    # What every rank would write: the judge is given the last one's.
    kept = folder / ("adapter" if rank == 1 else "adapter-0")
    if is_repaired:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            model.module.save_pretrained(kept)
    else:
        model.module.save_pretrained(kept)


if __name__ == "__main__":
    run(patient)
