"""Losses of preferences: pairs of answers, and single answers that were liked or not.

Legend: pi the model with its adapter, ref the frozen policy beside it; t trained tokens, y a whole completion.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.run.formulas.seen import Seen, Sums
from meshlora_ground.objectives.preferences import Dpo, Kto, Orpo


def dpo(objective: Dpo, seen: Seen) -> tuple[Tensor, Sums]:
    """Direct preference optimisation over pairs (Rafailov et al., 2023, equation 7), per pair.

    loss = -(1-e) log sigmoid(m) - e log sigmoid(-m), m = beta (log pi(y+)/ref(y+) - log pi(y-)/ref(y-)),
    e the label_smoothing.
    """
    assert seen.log_ref is not None
    rewards = objective.beta * (seen.log_p - seen.log_ref).sum(1)  # untrained tokens have 0 in both
    margin = rewards[0::2] - rewards[1::2]
    e = objective.label_smoothing if seen.is_training else 0.0
    loss = -(1 - e) * F.logsigmoid(margin) - e * F.logsigmoid(-margin)
    return loss, {"accuracy": (margin > 0).to(margin.dtype), "margin": margin}


def orpo(objective: Orpo, seen: Seen) -> tuple[Tensor, Sums]:
    """Odds-ratio preference optimisation (Hong et al., 2024, equations 3 to 7), per pair.

    loss = -l(y+) - beta log sigmoid(log odds(y+) - log odds(y-)), l(y) the mean of log pi(t) over the tokens of y,
    odds(y) = exp l(y) / (1 - exp l(y)).
    """
    mean = mean_log_p(seen)
    odds = log_odds(mean)
    ratio, nll = odds[0::2] - odds[1::2], -mean[0::2]  # rows alternate: better, worse
    loss = nll - objective.beta * F.logsigmoid(ratio)
    return loss, {"nll": nll, "accuracy": (ratio > 0).to(ratio.dtype), "log_odds_ratio": ratio}


def mean_log_p(seen: Seen) -> Tensor:
    """Mean of log pi over the trained tokens of each row, `[B]`."""
    return seen.log_p.sum(1) / seen.is_trained.sum(1)


def log_odds(log_p: Tensor) -> Tensor:
    """log (p / (1 - p)), accurate also for p close to 1."""
    return log_p - torch.log(-torch.expm1(log_p))


def kto(objective: Kto, seen: Seen) -> tuple[Tensor, Sums]:
    """Kahneman-Tversky optimisation (Ethayarajh et al., 2024, equation 8), per record.

    loss = w (1 - sigmoid(beta (r - z))) of a desirable y, with r = log pi(y)/ref(y) and z the reference point;
    w (1 - sigmoid(beta (z - r))) of an undesirable one, each with its own weight w.
    """
    assert seen.log_ref is not None
    assert seen.point is not None
    sign = seen.columns["desirable"].sum(1).sign()  # the column has +1 or -1 at each trained token
    gain = (seen.log_p - seen.log_ref).sum(1) - seen.point.to(sign.dtype)
    weight = torch.full_like(sign, objective.undesirable_weight).masked_fill(sign > 0, objective.desirable_weight)
    loss = weight * torch.sigmoid(-objective.beta * sign * gain)  # 1 - sigmoid(x) is sigmoid(-x)
    return loss, {"accuracy": (sign * gain > 0).to(sign.dtype), "kl": seen.point.expand_as(sign)}
