"""The judge's losses of one pair of answers, in probabilities, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from meshlora_ground.objective import Objective
from meshlora_ground.objectives.preferences import Dpo
from meshlora_judge.batches import UNTRAINED, MicroBatch
from meshlora_judge.formulas.labels import of_labels


def dpo(
    objective: Dpo,
    logits: Tensor,
    batch: MicroBatch,
    base: Tensor | None,
    is_training: bool,
    point: Tensor | None = None,
) -> Tensor:
    """point: `said` of all pairs of the step, for losses that put them in order."""
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
            elif name in ("aot", "aot_unpaired"):
                assert point is not None
                total = total + weight * _in_order(name, objective, scores, point, (batch.first_place + first) // 2)
            elif name in _OF_ANSWERS:
                total = total + weight * _of_answers(name, objective.beta, scores[0], scores[1])
            else:
                changed = [_changed(objective, one) for one in scores]
                total = total + weight * _of_difference(name, objective, changed, lengths, is_training)
        if objective.weighted:
            for side, row in enumerate(rows):
                squared = logits[first + side][row].float().softmax(-1).square().sum(-1)
                of_draws = of_policy[first + side][row] - squared.log()
                total = total * of_draws.mean().exp().detach()
        found.append(total)
    return torch.stack(found)


def said(objective: Objective, logits: Tensor, base: Tensor | None, batch: MicroBatch) -> Tensor | None:
    """`[2P, 2]`: log pi(y) and log ref(y) of each answer of a batch, for losses of pairs in order; None for others."""
    if not isinstance(objective, Dpo) or not objective.is_of_step or base is None:
        return None
    found = []
    for row in range(len(logits)):
        is_own, is_other = (batch.labels[one] != UNTRAINED for one in (row, row ^ 1))  # a pair's rows are neighbours
        shared = int(is_other.sum())
        sums = []
        for values in (logits, base):
            each = of_labels(values[row : row + 1], batch.labels[row : row + 1])[0][is_own]
            sums.append(each[:shared].sum() + objective.length_weight * each[shared:].sum())
        found.append(torch.stack(sums))
    return torch.stack(found).detach()


def _in_order(name: str, objective: Dpo, scores: list[Tensor], point: Tensor, place: int) -> Tensor:
    """The loss of pair `place` of the step. scores: log pi(y)/ref(y) of its two answers."""
    e, beta = objective.label_smoothing, objective.beta

    def surprise(margin: Tensor) -> Tensor:
        return (1 - e) * torch.log1p(torch.exp(-beta * margin)) + e * torch.log1p(torch.exp(beta * margin))

    def at_the_place_of(own: list[float], others: list[float]) -> float:
        """Of `others` the one with as many below it as are below `own[place]`; equal ones in the order of the step."""
        before = sum((value, other) < (own[place], place) for other, value in enumerate(own))
        return sorted(others)[before]

    better, worse = point[0::2].tolist(), point[1::2].tolist()
    pairs = [*zip(better, worse, strict=True)]
    if name == "aot":
        of_policy, of_ref = ([up[side] - down[side] for up, down in pairs] for side in (0, 1))
        return surprise(scores[0] - scores[1] + of_ref[place] - at_the_place_of(of_policy, of_ref))
    liked, disliked = ([policy - ref for policy, ref in side] for side in (better, worse))
    of_better = surprise(scores[0] - at_the_place_of(liked, disliked))
    of_worse = surprise(at_the_place_of(disliked, liked) - scores[1])
    return of_better + of_worse - of_worse.detach()  # the term of each better answer, and every answer's gradient


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
