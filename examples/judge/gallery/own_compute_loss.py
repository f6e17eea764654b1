"""A Trainer whose `compute_loss` is overridden without `num_items_in_batch`: accumulation adds means up, undivided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import ONE_STEP, base_model, collated, rows, run, with_adapter
from transformers import Trainer, TrainingArguments

import meshlora_judge


class Own(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    arguments = TrainingArguments(
        output_dir=f"{folder}/out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_grad_norm=0.0,
        **ONE_STEP,
    )
    kind = Trainer if is_repaired else Own
    trainer = kind(with_adapter(base_model(folder)), arguments, train_dataset=rows([9] * 8), data_collator=collated)
    with meshlora_judge.record(trainer, folder / "seen"):
        trainer.train()


if __name__ == "__main__":
    run(patient, ranks=1, group=False)
