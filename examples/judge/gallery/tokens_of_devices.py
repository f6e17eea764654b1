"""Trainer on DDP with `average_tokens_across_devices=False`: the mean of the ranks' means.

It was the default before July 2025 (transformers #39395).
"""

from __future__ import annotations

from pathlib import Path

from common import ONE_STEP, base_model, collated, rows, run, with_adapter
from transformers import Trainer, TrainingArguments

import meshlora_judge


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    arguments = TrainingArguments(
        output_dir=f"{folder}/out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        average_tokens_across_devices=is_repaired,
        **ONE_STEP,
    )
    model = with_adapter(base_model(folder))
    trainer = Trainer(model, arguments, train_dataset=rows(), data_collator=collated)
    with meshlora_judge.record(trainer, folder / "seen"):
        trainer.train()


if __name__ == "__main__":
    run(patient, group=False)
