"""DPO that goes on from a trained adapter, by TRL 0.24: the reference is the bare base, not where the run began.

With TRL 0.24 and transformers 4.57 on PYTHONPATH; TRL 1.16 keeps a copy of the start adapter, and is right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import ONE_STEP, VOCABULARY, base_model, rows, run, with_adapter
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import meshlora_judge


def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel({f"{number}": number for number in range(VOCABULARY)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="0", eos_token="1")


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    few = [row["input_ids"] for row in rows()]
    texts = [" ".join(map(str, ids)) for ids in few]
    pairs = {"prompt": texts[:4], "chosen": texts[2:6], "rejected": texts[4:8]}
    arguments = DPOConfig(
        output_dir=f"{folder}/out", per_device_train_batch_size=4, bf16=False, gradient_checkpointing=False, **ONE_STEP
    )
    model = with_adapter(base_model(folder), init_lora_weights=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # a stage of SFT before this one
            torch.nn.init.normal_(parameter, std=0.05)
    trainer = DPOTrainer(model, args=arguments, train_dataset=Dataset.from_dict(pairs), processing_class=tokenizer())
    with meshlora_judge.record(trainer, folder / "seen"):
        trainer.train()


if __name__ == "__main__":
    run(patient, ranks=1, group=False)
