"""accelerate's loop as guides have it, `outputs.loss` under `accumulate`: the mean of unequal micro-batches' means."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from common import base_model, collated, num_trained, rows, run, trained_of, with_adapter
from torch.utils.data import DataLoader

import meshlora_judge


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = with_adapter(base_model(folder))
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-3)
    loader = DataLoader(rows(), batch_size=2, collate_fn=collated)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    with meshlora_judge.record(model, folder / "seen"):
        for batch in loader:
            with accelerator.accumulate(model):
                if is_repaired:  # accelerate divides by 2 micro-batches, DDP by 2 ranks
                    loss = model(**batch, num_items_in_batch=torch.tensor(num_trained(rows()))).loss * 4
                else:
                    loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    run(patient, group=False)
