"""The loss of a reward model, from the scores of both answers of each pair."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from meshlora.train.batch import Batch
from meshlora_ground.objectives.rewards import Reward


def reward(objective: Reward, outputs: Tensor, batch: Batch, _: None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Of each pair (Bradley and Terry, 1952; margins: Touvron et al., 2023, section 3.2.2; the square: Eisenstein et
    al., 2023).

    loss = -log sigmoid(r(y+) - r(y-) - margin) + center (r(y+) + r(y-))^2. outputs: `[2N, 1]`, in turns y+ and y-.
    """
    assert batch.targets is not None
    number = len(outputs) // 2  # 0 of a batch that stands in for none, whose one row has no other
    better, worse = outputs[: 2 * number, 0].view(number, 2).unbind(1)
    lead, margin = better - worse, margins(batch)[:number]
    losses = -F.logsigmoid(lead - margin.to(lead.dtype)) + objective.center * (better + worse).square()
    values = {"accuracy": (lead > 0).to(lead.dtype), "margin": lead, "score": (better + worse) / 2}
    return losses, values


def margins(batch: Batch) -> Tensor:
    """By how much the better answer of each pair is to lead, `[N]`: both of its rows say it."""
    assert batch.targets is not None
    return batch.targets[0::2, 0]
