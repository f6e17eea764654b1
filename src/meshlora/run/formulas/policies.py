"""Policy gradients from rollouts.

Legend: pi the model with its adapter, ref the frozen policy beside it; t trained tokens, y a whole completion.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshlora.run.formulas.seen import Seen, Sums
from meshlora.run.mismatch import LARGEST, largest_gap, mismatch_sums
from meshlora_ground.objectives.policies import Grpo, Policy


def policy(objective: Policy | Grpo, seen: Seen) -> tuple[Tensor, Sums]:
    """Policy gradient with importance weights from records, per token, or per sequence (`mean_over`).

    loss_t = w_t (-c_t G_t + kl_coef kl_t - entropy_coef H_t)
    G_t = min(rho_t A_t, clip(rho_t) A_t) (PPO, Schulman et al., 2017, equation 7; GRPO, Shao et al., 2024, equation 3),
        clip(rho) in [1 - clip_low, 1 + clip_high], two sides of their own (DAPO, Yu et al., 2025, equation 8); or
        sg(clip(rho_t)) A_t log pi(t) (CISPO, MiniMax, 2025, equations 4 and 5), sg: without gradient; and others
        (`surrogate`, `sequence_weight`)
    rho_t = pi(t) / old(t), old the policy that acted; or (prod_t rho_t)^(1 / |y|), the same at all tokens of a sequence
        (GSPO, Zheng et al., 2025, equation 7)
    c_t = min(old(t) / engine(t), importance_cap), without gradient (truncated importance sampling, Yao et al., 2025),
        or as `correction` says
    """
    log_p, columns = seen.log_p, seen.columns
    # NaN: the record was written by the policy being trained. The ratio is 1, its gradient is not 0.
    old = torch.where(columns["old_log_prob"].isnan(), log_p.detach(), columns["old_log_prob"])
    log_rho, engine = log_ratio(objective, old, seen), columns["engine_log_prob"]
    ratio = log_rho.exp()
    gap = engine_gap(objective, old, engine, seen)
    weight = importance(objective, gap)
    if objective.loss == "vespo":
        gain = sequence_weight(objective, log_rho.detach(), weight, seen) * columns["advantage"] * log_p
        values = {"ratio": ratio}
    else:
        gain, is_clipped = surrogate(objective, ratio, columns["advantage"], log_p)
        gain = weight * gain
        values = {"ratio": ratio, "clip_fraction": is_clipped.to(ratio.dtype)}
    if objective.off_policy_mask is not None:
        gain = gain * is_kept(objective, torch.where(engine.isnan(), old, engine), seen)
    is_uncertain, bonus = uncertain(seen)
    loss = -(gain * is_uncertain)
    if seen.log_ref is not None:
        values["kl"] = divergence(objective, seen.log_ref - log_p)
        kl = values["kl"] * ratio if objective.kl_correction else values["kl"]
        loss = loss + objective.kl_coef * kl
    if seen.score is not None:
        values["entropy"] = seen.score
        loss = loss - objective.entropy_coef * bonus * seen.score
    values |= mismatch_sums(old, engine, is_out(objective, gap.exp()))
    # Not indexing by the mask: the host would wait for the count from the GPU.
    found = {name: _averaged(objective, _zero_untrained(value, seen), seen) for name, value in values.items()}
    if objective.mask_truncated and objective.per == "record":  # what is masked is not off policy
        found["ratio"] = found["ratio"] + ~seen.is_trained.any(1)
    found[LARGEST] = _zero_untrained(largest_gap(old, engine), seen)
    loss = _zero_untrained(columns["weight"] * loss, seen)
    if objective.max_completion_length is not None:
        return loss.sum(1) / objective.max_completion_length, found  # Dr. GRPO, Liu et al., 2025, section 3.2
    return _averaged(objective, loss, seen), found


def log_ratio(objective: Policy | Grpo, old: Tensor, seen: Seen) -> Tensor:
    """log rho at each token `[B, S]`; old: of the policy that acted."""
    each = seen.log_p - old
    if objective.ratio == "token":
        return each
    return (_zero_untrained(each, seen).sum(1, keepdim=True) / num_tokens(seen)).expand_as(each)


def surrogate(objective: Policy | Grpo, ratio: Tensor, advantage: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """(G of each token, whether its ratio was clipped). sapo: 4 / T sigmoid(T (rho - 1)) A, with T of the sign of A
    (SAPO, Gao et al., 2025, equation 5). delta: rho is at most that beside its clipped value (INTELLECT-2, Prime
    Intellect, 2025, section 3.4).
    """
    if objective.loss == "sapo":
        above, below = objective.sapo_temperature_pos, objective.sapo_temperature_neg
        temperature = torch.full_like(advantage, below).masked_fill(advantage > 0, above)
        return 4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantage, torch.zeros_like(ratio)
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    if objective.loss == "cispo":
        return clipped.detach() * advantage * log_p, clipped != ratio
    bounded = ratio if objective.delta is None else ratio.clamp(max=objective.delta)
    return torch.minimum(bounded * advantage, clipped * advantage), clipped * advantage < ratio * advantage


def engine_gap(objective: Policy | Grpo, old: Tensor, engine: Tensor, seen: Seen) -> Tensor:
    """log old - log engine at each token `[B, S]`, 0 where that is not known (NaN); or its sum over a sequence."""
    each = torch.where(engine.isnan(), 0.0, old - engine).detach()
    if objective.correction.startswith("token"):
        return each
    return _zero_untrained(each, seen).sum(1, keepdim=True).expand_as(each)


def importance(objective: Policy | Grpo, gap: Tensor) -> Tensor:
    """c of each token: old / engine, within its bounds, or 0 beyond them; 1 without a cap. gap: of `engine_gap`."""
    weight = gap.exp()
    if objective.importance_cap is None:
        return torch.ones_like(weight)
    if objective.correction.endswith("mask"):  # IcePop, Zhao et al., 2025; of sequences Liu et al., 2025
        return weight.masked_fill(is_out(objective, weight), 0.0)
    return weight.clamp(objective.importance_floor, objective.importance_cap)


def is_out(objective: Policy | Grpo, weight: Tensor) -> Tensor:
    """Whether a weight that corrects for the engine is out of its bounds."""
    if objective.importance_cap is None:
        return torch.zeros_like(weight, dtype=torch.bool)
    return (weight > objective.importance_cap) | (weight < objective.importance_floor)


def is_kept(objective: Policy | Grpo, sampled: Tensor, seen: Seen) -> Tensor:
    """Whether a token gains, `[B, S]`: of a negative advantage only in a sequence near the policy that sampled it
    (DeepSeek-V3.2, 2025, section 3.1). sampled: log-probabilities of the policy that sampled.
    """
    gap = _zero_untrained(sampled - seen.log_p.detach(), seen).sum(1, keepdim=True) / num_tokens(seen)
    assert objective.off_policy_mask is not None
    return (seen.columns["advantage"] >= 0) | (gap <= objective.off_policy_mask)


def uncertain(seen: Seen) -> tuple[Tensor, Tensor]:
    """(1 at the tokens of a step with the highest entropy, else 0, `[B, S]`; the same, over the share of them: means of
    it are over these tokens alone). All, if they are not chosen (Wang et al., 2025, "Beyond the 80/20 Rule").
    """
    if seen.point is None or seen.score is None:
        every = torch.ones_like(seen.log_p)
        return every, every
    least, share = seen.point.to(seen.log_p.dtype)
    found = (seen.score.detach() >= least).to(seen.log_p.dtype)
    return found, found / share


_LOWEST, _HIGHEST = math.log(1e-8), 20.0  # of a log-weight


def sequence_weight(objective: Policy | Grpo, log_ratio: Tensor, weight: Tensor, seen: Seen) -> Tensor:
    """exp(l + k log w - l w) at each token, `[B, S]`, w the ratio of the whole sequence, corrected for the engine; k
    and lambda of the advantage's sign (VESPO, 2026, equation 14). log_ratio, weight: of each token, without gradient.
    """
    each = log_ratio.clamp(-_HIGHEST, _HIGHEST) + weight.log().clamp(_LOWEST, _HIGHEST)
    log_w = _zero_untrained(each, seen).sum(1, keepdim=True).clamp(_LOWEST, _HIGHEST)
    is_below = seen.columns["advantage"] < 0
    k = torch.full_like(log_ratio, objective.vespo_k_pos).masked_fill(is_below, objective.vespo_k_neg)
    slope = torch.full_like(log_ratio, objective.vespo_lambda_pos).masked_fill(is_below, objective.vespo_lambda_neg)
    return torch.exp(slope + k * log_w - slope * log_w.exp())


def divergence(objective: Policy | Grpo, difference: Tensor) -> Tensor:
    """Estimate of KL(pi || ref) at each token, from d = log ref - log pi (Schulman, 2020, "Approximating KL
    Divergence"). k1: -d. k2: d^2 / 2. k3: exp(d) - d - 1, never negative (GRPO's, equation 4).

    On policy only the gradient of k2 is, on average, that of KL(pi || ref); that of k3 is of KL(ref || pi), of k1 none.
    """
    if objective.kl == "k1":
        return -difference
    return difference**2 / 2 if objective.kl == "k2" else difference.exp() - difference - 1


def num_tokens(seen: Seen) -> Tensor:
    """Trained tokens of each row, `[B, 1]`; 1 of a row that has none, as it is masked: its sums are 0."""
    return seen.is_trained.sum(1, keepdim=True).clamp(min=1)


def _averaged(objective: Policy | Grpo, values: Tensor, seen: Seen) -> Tensor:
    """`values` `[B, S]` of tokens, or their mean over each sequence, `[B]`, as the loss is averaged."""
    return values if objective.per == "token" else (values / num_tokens(seen)).sum(1)


def _zero_untrained(values: Tensor, seen: Seen) -> Tensor:
    return torch.where(seen.is_trained, values, 0.0)
