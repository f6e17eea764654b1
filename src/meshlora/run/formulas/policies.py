"""Policy gradients from rollouts.

Legend: pi the model with its adapter, ref the frozen policy beside it; t trained tokens, y a whole completion.
"""

from __future__ import annotations

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
        sg(clip(rho_t)) A_t log pi(t) (CISPO, MiniMax, 2025, equations 4 and 5), sg: without gradient
    rho_t = pi(t) / old(t), old the policy that acted; or (prod_t rho_t)^(1 / |y|), the same at all tokens of a sequence
        (GSPO, Zheng et al., 2025, equation 7)
    c_t = min(old(t) / engine(t), importance_cap), without gradient (truncated importance sampling, Yao et al., 2025)
    """
    log_p, columns = seen.log_p, seen.columns
    # NaN: the record was written by the policy being trained. The ratio is 1, its gradient is not 0.
    old = torch.where(columns["old_log_prob"].isnan(), log_p.detach(), columns["old_log_prob"])
    ratio, engine = log_ratio(objective, old, seen).exp(), columns["engine_log_prob"]
    gain, is_clipped = surrogate(objective, ratio, columns["advantage"], log_p)
    loss = -importance(objective, old, engine) * gain
    values = {"ratio": ratio, "clip_fraction": is_clipped.to(ratio.dtype)}
    if seen.log_ref is not None:
        values["kl"] = divergence(objective, seen.log_ref - log_p)
        loss = loss + objective.kl_coef * values["kl"]
    if seen.entropy is not None:
        values["entropy"] = seen.entropy
        loss = loss - objective.entropy_coef * seen.entropy
    values |= mismatch_sums(old, engine, objective.importance_cap)
    # Not indexing by the mask: the host would wait for the count from the GPU.
    found = {name: _averaged(objective, _zero_untrained(value, seen), seen) for name, value in values.items()}
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
    """(G of each token, whether its ratio was clipped)."""
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    if objective.loss == "cispo":
        return clipped.detach() * advantage * log_p, clipped != ratio
    return torch.minimum(ratio * advantage, clipped * advantage), clipped * advantage < ratio * advantage


def importance(objective: Policy | Grpo, old: Tensor, engine: Tensor) -> Tensor:
    """min(old / engine, importance_cap) of each token; 1 without a cap, or where the engine is not known (NaN)."""
    weight = torch.where(engine.isnan(), 0.0, old - engine).exp().detach()
    return torch.ones_like(weight) if objective.importance_cap is None else weight.clamp(max=objective.importance_cap)


def divergence(objective: Policy | Grpo, difference: Tensor) -> Tensor:
    """Estimate of KL(pi || ref) at each token, from d = log ref - log pi (Schulman, 2020, "Approximating KL
    Divergence"). k1: -d. k2: d^2 / 2. k3: exp(d) - d - 1, never negative (GRPO's, equation 4).

    On policy only the gradient of k2 is, on average, that of KL(pi || ref); that of k3 is of KL(ref || pi), of k1 none.
    """
    if objective.kl == "k1":
        return -difference
    return difference**2 / 2 if objective.kl == "k2" else difference.exp() - difference - 1


def num_tokens(seen: Seen) -> Tensor:
    """Trained tokens of each row, `[B, 1]`."""
    return seen.is_trained.sum(1, keepdim=True)


def _averaged(objective: Policy | Grpo, values: Tensor, seen: Seen) -> Tensor:
    """`values` `[B, S]` of tokens, or their mean over each sequence, `[B]`, as the loss is averaged."""
    return values if objective.per == "token" else (values / num_tokens(seen)).sum(1)


def _zero_untrained(values: Tensor, seen: Seen) -> Tensor:
    return torch.where(seen.is_trained, values, 0.0)
