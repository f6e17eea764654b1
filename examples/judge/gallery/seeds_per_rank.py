"""Every rank draws its own adapter: N adapters on N ranks, and one of them is saved.

PEFT's factors are plain tensors on a base that FSDP2 has sharded: nothing broadcasts them, as DDP would.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import base_model, collated, rows, run, sharded, trained_of, with_adapter

import meshlora_judge


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    if is_repaired:
        model = sharded(with_adapter(base_model(folder)))
    else:
        model = with_adapter(sharded(base_model(folder)), seed=1 + rank)
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-3)
    model.train()
    batch = collated(rows([9] * 8)[rank::2])
    with meshlora_judge.record(model, folder / "seen"):
        model(**batch).loss.backward()
        optimizer.step()


if __name__ == "__main__":
    run(patient)
