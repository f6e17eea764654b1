"""Inputs that tests of single parts share: a twin on disk with an adapter, and a batch with everything unequal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from meshlora_judge.inputs import write_adapter, write_twin
from meshlora_judge.reference import MicroBatch
from meshlora_judge.twin import twin_config


def make_twin(folder: Path, model_type: str, *, seed: int = 0, **overrides: Any) -> Path:
    """`folder/model`, a float64 twin, and `folder/adapter`, a PEFT adapter with A and B non-zero; returns `folder`."""
    write_twin(twin_config(model_type, **overrides), folder / "model", dtype=torch.float64, seed=seed)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    write_adapter(folder / "model", lora, folder / "adapter", seed=seed, trust_remote_code=False)
    return folder


def make_batches(num_sequences: int = 4, seq_len: int = 16, *, seed: int = 1) -> MicroBatch:
    """Right-padded sequences with unequal lengths and unequal numbers of trained tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 256, (num_sequences, seq_len), generator=generator)
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100
    mask = torch.ones_like(ids)
    for row in range(num_sequences):
        length = seq_len - 2 * row
        ids[row, length:] = 0
        mask[row, length:] = 0
        labels[row, length - 1 :] = -100
        labels[row, : 1 + row] = -100
    return MicroBatch(ids, mask, labels)
