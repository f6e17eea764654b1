"""PEFT's adapter added to a base that FSDP2 has sharded already: no gradient of it is summed over ranks.

The order of transformers' `distributed_config` with a trainer that adds the adapter afterwards.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import base_model, collated, rows, run, sharded, trained_of, with_adapter

import meshlora_judge


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    model = base_model(folder)
    model = sharded(with_adapter(model)) if is_repaired else with_adapter(sharded(model))
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-3)
    model.train()
    # Rows of equal length: how means are weighted is not what this is about.
    batch = collated(rows([9] * 8)[rank::2])
    with meshlora_judge.record(model, folder / "seen"):
        model(**batch).loss.backward()
        optimizer.step()


if __name__ == "__main__":
    run(patient)
