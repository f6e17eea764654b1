"""A Trainer whose `get_train_dataloader` gives its own loader: nothing shares the rows out, every rank has them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import ONE_STEP, base_model, collated, rows, run, with_adapter
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import meshlora_judge


class Own(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=2, collate_fn=self.data_collator)


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    arguments = TrainingArguments(output_dir=f"{folder}/out", per_device_train_batch_size=2, **ONE_STEP)
    kind = Trainer if is_repaired else Own
    trainer = kind(with_adapter(base_model(folder)), arguments, train_dataset=rows(), data_collator=collated)
    with meshlora_judge.record(trainer, folder / "seen"):
        trainer.train()


if __name__ == "__main__":
    run(patient, group=False)
