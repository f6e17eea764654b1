"""Packed rows with position ids: transformers looks for their borders only where there is neither mask nor cache.

With a mask of ones, or `use_cache` left as it is, tokens attend to the sequences before theirs, and nothing says so.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import base_model, rows, run, trained_of, with_adapter

import meshlora_judge


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    few = rows()
    batch = {
        "input_ids": torch.tensor([[token for row in few for token in row["input_ids"]]]),
        "labels": torch.tensor([[label for row in few for label in [-100, *row["labels"][1:]]]]),
        "position_ids": torch.tensor([[place for row in few for place in range(len(row["input_ids"]))]]),
    }
    batch |= {"use_cache": False} if is_repaired else {"attention_mask": torch.ones_like(batch["input_ids"])}
    model = with_adapter(base_model(folder))
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-3)
    model.train()
    with meshlora_judge.record(model, folder / "seen"):
        model(**batch).loss.backward()
        optimizer.step()


if __name__ == "__main__":
    run(patient, ranks=1)
