"""The judge's losses of preferences, and of a reward model, pair by pair."""

from __future__ import annotations

import torch
from torch import Tensor

from meshlora_ground.objectives.preferences import Kto, Orpo, Simpo
from meshlora_ground.objectives.rewards import Reward
from meshlora_judge.batches import UNTRAINED, MicroBatch
from meshlora_judge.formulas.labels import of_rows


def gained(logits: Tensor, base: Tensor, batch: MicroBatch) -> Tensor:
    """log p(row) - log p_base(row), over the trained tokens of each row: `[B]`."""
    return of_rows(logits, batch) - of_rows(base, batch)


def orpo(objective: Orpo, logits: Tensor, batch: MicroBatch, base: None, is_training: bool) -> Tensor:
    means = of_rows(logits, batch) / (batch.labels != UNTRAINED).sum(1)
    pairs = []
    for better, worse in means.view(-1, 2):
        odds, other = (p / (1 - p) for p in (better.exp(), worse.exp()))
        pairs.append(-better - objective.beta * torch.log(odds / (odds + other)))  # sigmoid of the log of odds / other
    return torch.stack(pairs)


def simpo(objective: Simpo, logits: Tensor, batch: MicroBatch, base: None, is_training: bool) -> Tensor:
    means = of_rows(logits, batch) / (batch.labels != UNTRAINED).sum(1)
    smoothing = objective.label_smoothing if is_training else 0.0
    pairs = []
    for better, worse in means.view(-1, 2):
        wins = torch.sigmoid(objective.beta * (better - worse - objective.gamma / objective.beta))
        pairs.append(-(1 - smoothing) * wins.log() - smoothing * (1 - wins).log())
    return torch.stack(pairs)


def kto(
    objective: Kto, logits: Tensor, batch: MicroBatch, base: Tensor | None, is_training: bool, point: Tensor
) -> Tensor:
    assert base is not None
    if objective.loss == "apo_zero_unpaired":
        point = torch.zeros_like(point)
    records = []
    for row, reward in enumerate(gained(logits, base, batch)):
        (label,) = set(batch.columns["desirable"][row][batch.labels[row] != UNTRAINED].tolist())
        if label == 1:
            records.append(objective.desirable_weight * (1 - torch.sigmoid(objective.beta * (reward - point))))
        else:
            records.append(objective.undesirable_weight * (1 - torch.sigmoid(objective.beta * (point - reward))))
    return torch.stack(records)


def reward(objective: Reward, outputs: Tensor, batch: MicroBatch) -> Tensor:
    """log (1 + e^(worse + margin - better)) + center (better + worse)^2. outputs: `[2N, 1]`."""
    assert batch.targets is not None
    pairs = []
    for row in range(0, len(outputs), 2):
        better, worse = outputs[row, 0], outputs[row + 1, 0]
        odds = torch.exp(worse + batch.targets[row, 0] - better)
        pairs.append(torch.log1p(odds) + objective.center * (better + worse) ** 2)
    return torch.stack(pairs)
