"""Trainers of transformers and TRL on a tiny llama: each function is one rank's script, and records two steps.

Rows have unequal lengths and gradients are accumulated. Each takes a fault to plant, "" for none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import meshlora_judge
from tests.judged.patients import base_of, collated, lora_config, rows, with_adapter

_COMMON: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "adam_epsilon": 1e-4,
    "max_grad_norm": 0.05,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


def _trained(trainer: Any, folder: Path, fault: str, by: str = "") -> None:
    """Train and record. by: how the recorder is told."""
    if fault == "not summed":
        _never_sync(trainer)
    if by == "callback":
        trainer.add_callback(meshlora_judge.RecordCallback(folder / "seen", steps=2))
        trainer.train()
        return
    with meshlora_judge.record(trainer, folder / "seen", steps=2):
        trainer.train()


def _never_sync(trainer: Any) -> None:
    """Every micro-batch in DDP's no_sync, as if it were not the last of its step."""
    step = trainer.training_step

    def training_step(model: Any, *args: Any, **kwargs: Any) -> Any:
        model.require_backward_grad_sync = False
        return step(model, *args, **kwargs)

    trainer.training_step = training_step


def transformers_trainer(rank: int, folder: Path, fault: str, by: str = "") -> None:
    """fault "per device": `average_tokens_across_devices` is turned off."""
    from transformers import Trainer, TrainingArguments

    options = _COMMON | {"average_tokens_across_devices": fault != "per device"}
    trainer = Trainer(
        model=with_adapter(base_of(folder)),
        args=TrainingArguments(folder / "out", **options),
        train_dataset=rows(0) + rows(1),
        data_collator=collated,
    )
    _trained(trainer, folder, fault, by)


def sft(rank: int, folder: Path, fault: str, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """fault "mean of means": the trainer takes its loss for the mean of a micro-batch, as transformers did for long."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=base_of(folder),
        args=SFTConfig(folder / "out", bf16=False, **_COMMON, **more),
        train_dataset=Dataset.from_list(rows(0) + rows(1)),
        peft_config=lora_config(),
    )
    if fault == "mean of means":
        trainer.model_accepts_loss_kwargs = False
        get = trainer.get_batch_samples
        trainer.get_batch_samples = lambda *args: (get(*args)[0], None)
    _trained(trainer, folder, fault)


def _words(ids: list[int]) -> str:
    return " ".join(f"w{place}" for place in ids)


def dpo(rank: int, folder: Path, fault: str, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """fault "exchanged": the rejected answer is preferred. "mislabelled": its arguments say hinge. "ref": the adapter
    was there before, so TRL copies it.
    """
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = []
    for first, second in zip(rows(0) + rows(2), rows(1) + rows(3), strict=True):
        prompt, chosen = first["input_ids"][:2], first["input_ids"][2:]
        said = {"prompt": _words(prompt), "chosen": " " + _words(chosen)}
        pairs.append(said | {"rejected": " " + _words(second["input_ids"])})
    is_there = fault == "ref"
    trainer = DPOTrainer(
        model=with_adapter(base_of(folder)) if is_there else base_of(folder),
        args=DPOConfig(folder / "out", bf16=False, **{"beta": 0.5, **_COMMON, **more}),
        train_dataset=Dataset.from_list(pairs),
        peft_config=None if is_there else lora_config(),
    )
    if is_there:  # else policy and reference are the same model
        for name, parameter in trainer.model.named_parameters():
            if ".ref." in name:
                parameter.data.mul_(0.5)
    if fault == "exchanged":
        loss = trainer.compute_loss

        def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            trainer.beta = -0.5
            return loss(model, inputs, *args, **kwargs)

        trainer.compute_loss = compute_loss
    if fault == "mislabelled":
        trainer.args.loss_type = ["hinge"]
    _trained(trainer, folder, fault)


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(said.split()))) + 0.1 * len(said) for said in completions]


_DIVERGING = {"beta": 0.1, "temperature": 0.8, "use_bias_correction_kl": False}


def grpo(rank: int, folder: Path, fault: str, more: Mapping[str, Any] = _DIVERGING) -> None:
    """fault "not summed": ranks keep their own gradients. more: options beside TRL's own."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    options = _COMMON | {"num_generations": 4, "max_completion_length": 8, "per_device_train_batch_size": 4}
    options |= {"gradient_accumulation_steps": 2, **more}
    torch.manual_seed(rank)
    prompts = [{"prompt": _words(row["input_ids"][:3])} for row in rows(0)]
    trainer = GRPOTrainer(
        model=base_of(folder),
        reward_funcs=_reward,
        args=GRPOConfig(folder / "out", bf16=False, **options),
        train_dataset=Dataset.from_list(prompts),
        peft_config=lora_config(),
    )
    _trained(trainer, folder, fault)
