"""Runs of transformers' Trainer with PEFT on one process, and of `MeshTrainer` on a mesh: lines and adapter.

13 rows of unequal lengths, batches of 2, two micro-batches a step, norms clipped, two epochs, in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import meshlora
from meshlora_extra.hf import MeshTrainer
from meshlora_judge.compare import compare_adapters

BASE = str(Path(__file__).resolve().parents[2] / "examples/tiny_base")
# Name of a run -> what it asks for, beside what all have.
RUNS: dict[str, dict[str, Any]] = {
    "linear": {"lr_scheduler_type": "linear"},
    "cosine_with_restarts": {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    "polynomial": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
    "warmup_stable_decay": {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 3}},
    "cosine_with_min_lr": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "average_tokens_across_devices=False": {"average_tokens_across_devices": False},
    "DataCollatorWithFlattening": {},
}
_LIMIT = 1e-9


def start(folder: Path) -> Path:
    """An adapter with both factors away from zero, made once."""
    if not folder.is_dir():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
        config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(model, config).save_pretrained(str(folder))
    return folder


def _rows() -> list[dict[str, list[int]]]:
    numbers = torch.Generator().manual_seed(9)
    found = []
    for length in torch.randint(5, 40, (13,), generator=numbers).tolist():
        ids = torch.randint(3, 200, (length,), generator=numbers).tolist()
        found.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    return found


def _trained(name: str, kind: Any, model: Any, out: Path) -> list[dict[str, float]]:
    options: dict[str, Any] = {"lr_scheduler_type": "constant"} | RUNS[name]
    arguments = TrainingArguments(
        str(out),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=3e-3,
        max_grad_norm=0.05,
        weight_decay=0.1,
        warmup_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    collator: Any = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(BASE))
    if name == "DataCollatorWithFlattening":
        collator = DataCollatorWithFlattening()
    trainer = kind(model=model, args=arguments, data_collator=collator, train_dataset=_rows())
    trainer.remove_callback(PrinterCallback)
    with meshlora.lift():
        trainer.train()
    trainer.save_model(str(out / "adapter"))
    kept = ("loss", "grad_norm", "learning_rate")
    return [{key: line[key] for key in kept} for line in trainer.state.log_history if "loss" in line]


def theirs(name: str, adapter: Path, out: Path) -> list[dict[str, float]]:
    """The lines of transformers and PEFT on one process; leaves `out/adapter`."""
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    for value in model.parameters():
        value.data = value.data.double()
    return _trained(name, Trainer, model, out)


def ours(name: str, adapter: Path, out: Path, topology: str) -> list[dict[str, float]]:
    """Body of a rank: the same of `MeshTrainer`."""
    model = meshlora.load(BASE, adapter=str(adapter), topology=topology, dtype="float64")
    return _trained(name, MeshTrainer, model, out)


def verdict(lines: list[dict[str, float]], mine: list[dict[str, float]], out: Path, own: Path) -> tuple[str, str]:
    """(what it is, why) of a run. out, own: folders of their run and ours."""
    if len(lines) != len(mine) or not lines:
        return "WRONG", f"{len(mine)} lines for {len(lines)}"
    gaps = [abs(one[key] - other[key]) for one, other in zip(lines, mine, strict=True) for key in one]
    gap = max(*gaps, compare_adapters(out / "adapter", own / "adapter").relative)
    return ("equal" if gap < _LIMIT else "WRONG"), f"largest {gap:.0e}"
