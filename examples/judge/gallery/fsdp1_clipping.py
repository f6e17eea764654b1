"""`torch.nn.utils.clip_grad_norm_` on FSDP1: every rank clips its shard by the norm of that shard.

FSDP1's own `clip_grad_norm_` is what its page asks for.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import base_model, collated, num_trained, rows, run, trained_of, with_adapter
from torch.distributed.fsdp import FullyShardedDataParallel

import meshlora_judge


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    model = with_adapter(base_model(folder))
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-3)
    model.train()
    batch, total = collated(rows()[rank::2]), torch.tensor(num_trained(rows()))
    with meshlora_judge.record(model, folder / "seen"):
        (model(**batch, num_items_in_batch=total).loss * 2).backward()
        if is_repaired:
            model.clip_grad_norm_(0.05)
        else:
            torch.nn.utils.clip_grad_norm_(trained_of(model), 0.05)
        optimizer.step()


if __name__ == "__main__":
    run(patient)
