"""Reentrant gradient checkpointing under PEFT: the layers' inputs need no gradient, so no adapter in them gets one.

A LoRA on the head keeps the loss differentiable, and all goes on without an error. With transformers 4.57 and PEFT 0.18
on PYTHONPATH; the installed ones are right.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import base_model, collated, rows, run, trained_of, with_adapter

import meshlora_judge


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    model = with_adapter(base_model(folder), target_modules=["q_proj", "v_proj", "lm_head"])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-3)
    model.train()
    with meshlora_judge.record(model, folder / "seen"):
        model(**collated(rows())).loss.backward()
        optimizer.step()


if __name__ == "__main__":
    run(patient, ranks=1)
