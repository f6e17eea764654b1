"""Losses as sums over trained tokens. Dividing by the global number of tokens is `gradsync.finish_gradients`' part."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log p(label) over the trained tokens, in fp32 (fp64 inside the lift).

    logits: `[B, S, V]`; labels: `[B, S]`, shifted already (labels[b, t] is the token after t), -100 where untrained.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
