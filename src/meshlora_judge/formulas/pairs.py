"""The judge's losses of one pair of answers, in probabilities, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from meshlora_ground.objectives.preferences import Dpo
from meshlora_judge.batches import UNTRAINED, MicroBatch
from meshlora_judge.formulas.labels import of_labels


def dpo(objective: Dpo, logits: Tensor, batch: MicroBatch, base: Tensor | None, is_training: bool) -> Tensor:
    assert base is not None
    of_policy, of_base = of_labels(logits, batch.labels), of_labels(base, batch.labels)
    found = []
    for first in range(0, len(logits), 2):
        rows = [batch.labels[first + side] != UNTRAINED for side in (0, 1)]
        lengths = [int(row.sum()) for row in rows]
        scores, nll = [], -of_policy[first][rows[0]].sum() / lengths[0]
        for side, row in enumerate(rows):
            each = of_policy[first + side][row] - of_base[first + side][row]
            shared, beyond = each[: min(lengths)], each[min(lengths) :]
            scores.append(shared.sum() + objective.length_weight * beyond.sum())
        total = torch.zeros_like(nll)
        for name, weight in objective.losses.items():
            if name == "sft":
                total = total + weight * nll
            elif name in _OF_ANSWERS:
                total = total + weight * _of_answers(name, objective.beta, scores[0], scores[1])
            else:
                changed = [_changed(objective, one) for one in scores]
                total = total + weight * _of_difference(name, objective, changed, lengths, is_training)
        found.append(total)
    return torch.stack(found)


def _changed(objective: Dpo, score: Tensor) -> Tensor:
    """The score of an answer, u = pi / ref: log u, 1 - 1/u, log (2u / (u + 1)) or (u^(a-1) - 1) / (a - 1)."""
    u = score.exp()
    if objective.f_divergence == "forward_kl":
        return 1 - 1 / u
    if objective.f_divergence == "js_divergence":
        return torch.log(2 * u / (u + 1))
    if objective.f_divergence == "alpha_divergence":
        return (u ** (objective.f_alpha - 1) - 1) / (objective.f_alpha - 1)
    return score


def _of_difference(name: str, objective: Dpo, scores: list[Tensor], lengths: list[int], is_training: bool) -> Tensor:
    beta, e = objective.beta, objective.label_smoothing
    by_length = scores[0] / lengths[0] - scores[1] / lengths[1]
    if name == "ipo":
        return (by_length - 0.5 / beta).square()
    if name == "sigmoid_norm":
        return torch.log(1 + torch.exp(-beta * by_length))
    margin = beta * (scores[0] - scores[1])
    wins = 1 / (1 + torch.exp(-margin))
    loses = 1 / (1 + torch.exp(margin))
    if name == "hinge":
        return (1 - margin) * (margin < 1)
    if name == "exo_pair":
        return wins * torch.log(wins / (1 - e)) + loses * torch.log(loses / e)
    if name == "robust":
        return ((1 - e) * -wins.log() - e * -loses.log()) / (1 - 2 * e)
    if name == "discopop":
        share = 1 / (1 + torch.exp(-margin / objective.discopop_tau))
        return (1 - share) * -wins.log() + share / torch.exp(margin)
    assert name == "sigmoid", name
    smoothing = e if is_training else 0.0
    return -(1 - smoothing) * wins.log() - smoothing * loses.log()


_OF_ANSWERS = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")


def _of_answers(name: str, beta: float, better: Tensor, worse: Tensor) -> Tensor:
    """Losses of each answer by itself."""
    liked, disliked = 1 / (1 + torch.exp(-beta * better)), 1 / (1 + torch.exp(-beta * worse))
    if name == "nca_pair":
        return -liked.log() - 0.5 * (1 - liked).log() - 0.5 * (1 - disliked).log()
    if name == "bco_pair":
        return -torch.log(liked * (1 - disliked))
    if name == "sppo_hard":
        return (better - 1 / (2 * beta)).square() + (worse + 1 / (2 * beta)).square()
    if name == "apo_zero":
        return 1 - liked + disliked
    assert name == "apo_down", name
    return liked + 1 - 1 / (1 + torch.exp(beta * (worse - better)))
