"""An optimizer made after a first forward of an FSDP2 model: it has parameters that the model no longer trains.

The root is not sharded again after a forward, so its parameters are others than in the step that follows.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import base_model, collated, num_trained, rows, run, sharded, trained_of, with_adapter

import meshlora_judge


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    model = sharded(with_adapter(base_model(folder), target_modules=["q_proj", "v_proj", "lm_head"]))
    batch, total = collated(rows()[rank::2]), torch.tensor(num_trained(rows()))
    if is_repaired:
        optimizer = torch.optim.AdamW(trained_of(model), lr=1e-3)
    model.eval()
    model(**batch)  # an evaluation before training
    if not is_repaired:
        optimizer = torch.optim.AdamW(trained_of(model), lr=1e-3)
    model.train()
    with meshlora_judge.record(model, folder / "seen"):
        (model(**batch, num_items_in_batch=total).loss * 2).backward()
        optimizer.step()


if __name__ == "__main__":
    run(patient)
