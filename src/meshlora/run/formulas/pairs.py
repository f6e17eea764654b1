"""What is made of the two log-ratios of a pair of answers: the losses of `dpo`, under TRL's names.

Legend: y+ the better answer, y- the worse one, h(y) = log pi(y) / ref(y), m = beta (f(h(y+)) - f(h(y-))), f the score
of an f-divergence, h itself for the reverse KL; e the label_smoothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.run.formulas.seen import Seen
from meshlora_ground.objectives.preferences import Dpo


@dataclass(frozen=True)
class Pairs:
    """The pairs of a batch, each `[2P]`: a better answer, then the worse one.

    ratio: h(y). score: f(h(y)). length: trained tokens of y. nll: the mean of -log pi(t) over them. partner: `[2P, 2]`,
    `ordered_pairs.partners` of the step, if pairs are put in order.
    """

    ratio: Tensor
    score: Tensor
    length: Tensor
    nll: Tensor
    partner: Tensor | None

    @classmethod
    def of(cls, objective: Dpo, seen: Seen) -> Pairs:
        """Those of a batch whose rows alternate: better, worse."""
        assert seen.log_ref is not None
        each = seen.log_p - seen.log_ref  # untrained tokens have 0 in both
        if objective.length_weight != 1:
            each = each * length_weights(objective, seen.is_trained).to(each.dtype)
        ratio, length = each.sum(1), seen.is_trained.sum(1)
        return cls(ratio, score(objective, ratio), length, -seen.log_p.sum(1) / length, seen.point)

    @property
    def margin(self) -> Tensor:
        """m / beta, `[P]`."""
        return self.score[0::2] - self.score[1::2]

    @property
    def mean_margin(self) -> Tensor:
        """As `margin`, of scores by length."""
        by_length = self.score / self.length
        return by_length[0::2] - by_length[1::2]


def length_weights(objective: Dpo, is_trained: Tensor) -> Tensor:
    """The weight of each token, `[2P, S]`: `length_weight` beyond the length of the shorter answer, else 1 (LD-DPO,
    Liu et al., 2024, equation 9).
    """
    shorter = is_trained.sum(1).view(-1, 2).amin(1).repeat_interleave(2).unsqueeze(1)
    is_shared = is_trained.cumsum(1) <= shorter
    weights = torch.ones_like(is_trained, dtype=torch.float64)  # in full precision, whatever that of the loss
    return weights.masked_fill(~is_shared, objective.length_weight)


def score(objective: Dpo, ratio: Tensor) -> Tensor:
    """f'(t) of each answer up to a constant, from h = log t (f-DPO, Wang et al., 2023, table 1)."""
    if objective.f_divergence == "forward_kl":
        return 1 - torch.exp(-ratio)
    if objective.f_divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(ratio)
    if objective.f_divergence == "alpha_divergence":
        power = objective.f_alpha - 1
        return torch.expm1(power * ratio) / power
    return ratio


def _sigmoid(objective: Dpo, pairs: Pairs) -> Tensor:
    """-(1-e) log sigmoid(m) - e log sigmoid(-m) (DPO, Rafailov et al., 2023, equation 7)."""
    return smoothed(objective.beta * pairs.margin, objective.label_smoothing)


def smoothed(margin: Tensor, e: float) -> Tensor:
    """-(1-e) log sigmoid(m) - e log sigmoid(-m)."""
    return -(1 - e) * F.logsigmoid(margin) - e * F.logsigmoid(-margin)


def _sigmoid_norm(objective: Dpo, pairs: Pairs) -> Tensor:
    """-log sigmoid of m of scores by length (Tulu 3, Lambert et al., 2024, equation 6)."""
    return -F.logsigmoid(objective.beta * pairs.mean_margin)


def _hinge(objective: Dpo, pairs: Pairs) -> Tensor:
    """max(0, 1 - m) (SLiC, Zhao et al., 2023; RSO, Liu et al., 2023)."""
    return torch.relu(1 - objective.beta * pairs.margin)


def _ipo(objective: Dpo, pairs: Pairs) -> Tensor:
    """(d - 1 / (2 beta))^2, d the difference of scores by length (IPO, Azar et al., 2023, equation 17)."""
    return (pairs.mean_margin - 1 / (2 * objective.beta)) ** 2


def _exo_pair(objective: Dpo, pairs: Pairs) -> Tensor:
    """KL of (sigmoid(m), sigmoid(-m)) from (1-e, e) (EXO, Ji et al., 2024, equation 16)."""
    margin, e = objective.beta * pairs.margin, objective.label_smoothing
    won, lost = F.logsigmoid(margin), F.logsigmoid(-margin)
    return won.exp() * (won - math.log1p(-e)) + lost.exp() * (lost - math.log(e))


def _robust(objective: Dpo, pairs: Pairs) -> Tensor:
    """(-(1-e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2e) (robust DPO, Chowdhury et al., 2024, equation 12)."""
    margin, e = objective.beta * pairs.margin, objective.label_smoothing
    return (e * F.logsigmoid(-margin) - (1 - e) * F.logsigmoid(margin)) / (1 - 2 * e)


def _discopop(objective: Dpo, pairs: Pairs) -> Tensor:
    """A mixture of -log sigmoid(m) and exp(-m) by sigmoid(m / tau) (DiscoPOP, Lu et al., 2024, equation 5)."""
    margin = objective.beta * pairs.margin
    share = torch.sigmoid(margin / objective.discopop_tau)
    return (1 - share) * -F.logsigmoid(margin) + share * torch.exp(-margin)


def _sft(objective: Dpo, pairs: Pairs) -> Tensor:
    """The mean of -log pi(t) over the better answer (RPO, Pang et al., 2024, equation 1)."""
    return pairs.nll[0::2]


def _nca_pair(objective: Dpo, pairs: Pairs) -> Tensor:
    """-log s(b h+) - log s(-b h+) / 2 - log s(-b h-) / 2, s sigmoid, b beta (NCA, Chen et al., 2024, equation 11)."""
    better, worse = objective.beta * pairs.ratio[0::2], objective.beta * pairs.ratio[1::2]
    return -F.logsigmoid(better) - (F.logsigmoid(-better) + F.logsigmoid(-worse)) / 2


def _bco_pair(objective: Dpo, pairs: Pairs) -> Tensor:
    """-log sigmoid(beta h(y+)) - log sigmoid(-beta h(y-)) (BCO, Jung et al., 2024, without its shift)."""
    return -F.logsigmoid(objective.beta * pairs.ratio[0::2]) - F.logsigmoid(-objective.beta * pairs.ratio[1::2])


def _sppo_hard(objective: Dpo, pairs: Pairs) -> Tensor:
    """(h(y+) - 1 / (2 beta))^2 + (h(y-) + 1 / (2 beta))^2 (SPPO, Wu et al., 2024, equation 4.7, P 1 and 0)."""
    half = 0.5 / objective.beta
    return (pairs.ratio[0::2] - half) ** 2 + (pairs.ratio[1::2] + half) ** 2


def _apo_zero(objective: Dpo, pairs: Pairs) -> Tensor:
    """sigmoid(-beta h(y+)) + sigmoid(beta h(y-)) (APO, D'Oosterlinck et al., 2024, equation 7)."""
    return torch.sigmoid(-objective.beta * pairs.ratio[0::2]) + torch.sigmoid(objective.beta * pairs.ratio[1::2])


def _apo_down(objective: Dpo, pairs: Pairs) -> Tensor:
    """sigmoid(beta h(y+)) + sigmoid(-m) (APO, equation 8)."""
    better, worse = pairs.ratio[0::2], pairs.ratio[1::2]
    return torch.sigmoid(objective.beta * better) + torch.sigmoid(objective.beta * (worse - better))


def _aot(objective: Dpo, pairs: Pairs) -> Tensor:
    """`smoothed` beta (d - e): d = log pi(y+) - log pi(y-) of all pairs of the step in order, e likewise of ref (AOT,
    Melnyk et al., 2024, equation 6). e has no gradient: each d needs only the number that it is compared with.
    """
    assert pairs.partner is not None
    difference = pairs.ratio[0::2] - pairs.ratio[1::2] - pairs.partner[0::2, 0].to(pairs.ratio.dtype)
    return smoothed(objective.beta * difference, objective.label_smoothing)


def _aot_unpaired(objective: Dpo, pairs: Pairs) -> Tensor:
    """`smoothed` beta (h+ - h-), h of all better answers of the step in order, and of all worse ones (AOT, equation 7).

    Each answer has the gradient of its own term; the value is that of the better one's, counted once.
    """
    assert pairs.partner is not None
    partner = pairs.partner[:, 1].to(pairs.ratio.dtype)
    of_better = smoothed(objective.beta * (pairs.ratio - partner)[0::2], objective.label_smoothing)
    of_worse = smoothed(objective.beta * (partner - pairs.ratio)[1::2], objective.label_smoothing)
    return of_better + (of_worse - of_worse.detach())


LOSSES: dict[str, Callable[[Dpo, Pairs], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "robust": _robust,
    "discopop": _discopop,
    "sft": _sft,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
}
