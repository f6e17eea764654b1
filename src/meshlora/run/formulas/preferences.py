"""Losses of preferences: pairs of answers, single answers that were liked or not, and scores of a reward model.

Legend: pi the model with its adapter, ref the frozen policy beside it; t trained tokens, y a whole completion.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.run.formulas import pairs
from meshlora.run.formulas.seen import Seen, Sums
from meshlora.train.batch import Batch
from meshlora_ground.objectives.preferences import Dpo, Kto, Orpo, Simpo
from meshlora_ground.objectives.rewards import Reward


def dpo(objective: Dpo, seen: Seen) -> tuple[Tensor, Sums]:
    """Direct preference optimisation over pairs, per pair: the sum of its losses (`pairs.LOSSES`), each weighted."""
    found = pairs.Pairs.of(objective, seen)
    margin = objective.beta * found.margin
    loss = torch.zeros_like(margin)
    for name, weight in objective.losses.items():
        # Labels that are smoothed are of training; of the other losses it is a part of what they are.
        is_plain = name == "sigmoid" and not seen.is_training
        one = -F.logsigmoid(margin) if is_plain else pairs.LOSSES[name](objective, found)
        loss = loss + weight * one
    if objective.weighted:
        loss = loss * on_policy(seen)
    return loss, _compared(margin)


def on_policy(seen: Seen) -> Tensor:
    """w(y+) w(y-), `[P]`, without gradient: w the geometric mean of pi(t) / sum_v pi(v)^2 over the tokens of y (WPO,
    Zhou et al., 2024, equation 2): about 1 where the policy draws the answers itself.
    """
    assert seen.score is not None
    mean = (seen.log_p.detach() - seen.score).sum(1) / seen.is_trained.sum(1)
    return (mean[0::2] + mean[1::2]).exp()


def _compared(margin: Tensor) -> Sums:
    """What is reported of the margins of pairs, before SimPO's gamma."""
    return {"accuracy": (margin > 0).to(margin.dtype), "margin": margin}


def simpo(objective: Simpo, seen: Seen) -> tuple[Tensor, Sums]:
    """Simple preference optimisation (Meng et al., 2024, equation 6), per pair.

    loss = -(1-e) log sigmoid(m) - e log sigmoid(-m), m = beta (l(y+) - l(y-)) - gamma, l(y) the mean of log pi(t) over
    the tokens of y, e the label_smoothing.
    """
    mean = objective.beta * mean_log_p(seen)
    margin = mean[0::2] - mean[1::2]
    e = objective.label_smoothing if seen.is_training else 0.0
    loss = pairs.smoothed(margin - objective.gamma, e)
    return loss, _compared(margin)


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
    w (1 - sigmoid(beta (z - r))) of an undesirable one, each with its own weight w. apo_zero_unpaired: z is 0 (APO,
    D'Oosterlinck et al., 2024, equation 7, of single answers).
    """
    assert seen.log_ref is not None
    sign = seen.columns["desirable"].sum(1).sign()  # the column has +1 or -1 at each trained token
    point = torch.zeros_like(sign[:0].sum()) if seen.point is None else seen.point.to(sign.dtype)
    gain = (seen.log_p - seen.log_ref).sum(1) - point
    weight = torch.full_like(sign, objective.undesirable_weight).masked_fill(sign > 0, objective.desirable_weight)
    loss = weight * torch.sigmoid(-objective.beta * sign * gain)  # 1 - sigmoid(x) is sigmoid(-x)
    return loss, {"accuracy": (sign * gain > 0).to(sign.dtype), "kl": point.expand_as(sign)}


def reward(objective: Reward, outputs: Tensor, batch: Batch, _: None) -> tuple[Tensor, Sums]:
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
