"""The loss of a reward model, pair by pair."""

from __future__ import annotations

import torch
from torch import Tensor

from meshlora_ground.objectives.rewards import Reward
from meshlora_judge.batches import MicroBatch


def reward(objective: Reward, outputs: Tensor, batch: MicroBatch) -> Tensor:
    """log (1 + e^(worse + margin - better)) + center (better + worse)^2. outputs: `[2N, 1]`."""
    assert batch.targets is not None
    pairs = []
    for row in range(0, len(outputs), 2):
        better, worse = outputs[row, 0], outputs[row + 1, 0]
        odds = torch.exp(worse + batch.targets[row, 0] - better)
        pairs.append(torch.log1p(odds) + objective.center * (better + worse) ** 2)
    return torch.stack(pairs)
