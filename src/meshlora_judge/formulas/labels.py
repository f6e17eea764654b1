"""Log-probabilities of labels, from whole logits."""

from __future__ import annotations

import torch
from torch import Tensor

from meshlora_judge.batches import UNTRAINED, MicroBatch


def of_rows(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Sum of log p over the trained tokens of each row, `[B]`."""
    log_p = of_labels(logits, batch.labels)
    return torch.stack([row[labels != UNTRAINED].sum() for row, labels in zip(log_p, batch.labels, strict=True)])


def of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """log p of each label, `[B, S]`; untrained positions get that of token 0."""
    log_softmax = logits.float().log_softmax(-1)
    return log_softmax.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
