"""The judge's policy gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshlora_ground.objectives.policies import Grpo, Policy
from meshlora_judge.batches import UNTRAINED, MicroBatch
from meshlora_judge.formulas.labels import of_labels


def policy(
    objective: Policy | Grpo,
    logits: Tensor,
    batch: MicroBatch,
    base: Tensor | None,
    is_training: bool,
    point: Tensor | None = None,
) -> Tensor:
    """One loss per trained token, or per sequence. point: of `least_entropy`."""
    found = list[Tensor]()
    of_policy, of_base = of_labels(logits, batch.labels), None
    if base is not None:
        of_base = of_labels(base, batch.labels)
    for row in range(len(logits)):
        own = batch.labels[row] != UNTRAINED
        if not own.any():  # masked: a sequence of loss 0, no token
            if objective.mean_over != "token":
                found.append(0 * of_policy[row].sum())
            continue
        log_p = of_policy[row][own]
        columns = {name: column[row][own].to(log_p.dtype) for name, column in batch.columns.items()}
        gain, entropy = _gain(objective, log_p, columns), entropies(logits[row][own])
        if point is not None:
            gain = torch.where(entropy >= point[0], gain, 0.0)
            entropy = torch.where(entropy >= point[0], entropy, 0.0) / point[1]
        if of_base is not None:
            divergence = _divergence(objective.kl, log_p, of_base[row][own])
            if objective.kl_correction:
                divergence = divergence * _ratio(objective, log_p, columns)
            gain = gain - objective.kl_coef * divergence
        if objective.entropy_coef:
            gain = gain + objective.entropy_coef * entropy
        gain = columns["weight"] * gain
        if objective.mean_over == "token":
            found += (-gain).unbind()
        else:
            found.append(-gain.sum() / (objective.max_completion_length or len(gain)))
    # With a gradient, of nothing, where no token is left.
    return torch.stack(found) if found else of_policy[:0].sum(1)


def entropies(logits: Tensor) -> Tensor:
    """Of each of the distributions `[T, V]`."""
    p = logits.float().softmax(-1)
    return -(p * p.log()).sum(-1)


def least_entropy(objective: Any, every: Tensor) -> Tensor:
    """(The quantile of the entropies of a step's tokens above which one is trained, the share of those that are)."""
    least = torch.quantile(every, 1 - objective.top_entropy) - 1e-9  # one that is the quantile itself is above it
    kept = [entropy for entropy in every.tolist() if entropy >= float(least)]
    return torch.stack([least, torch.full_like(least, len(kept) / len(every))])


def _gain(objective: Policy | Grpo, log_p: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """What each token of a sequence gains, weighted for the engine that sampled it."""
    advantage, acted, ratio = columns["advantage"], _acted(log_p, columns), _ratio(objective, log_p, columns)
    engine = torch.where(torch.isnan(columns["engine_log_prob"]), acted, columns["engine_log_prob"])
    weight = _weight(objective, torch.exp(acted) / torch.exp(engine))
    if objective.loss == "vespo":
        of_tokens = _vespo(objective, (log_p.detach() - acted).tolist(), weight.tolist(), advantage.tolist())
        gain = torch.tensor(of_tokens, dtype=log_p.dtype, device=log_p.device) * advantage * log_p
    else:
        gain = weight * _gain_of_ratio(objective, ratio, advantage, log_p)
    if objective.off_policy_mask is not None:
        distance = float((engine - log_p.detach()).mean())
        if distance > objective.off_policy_mask:
            gain = gain * (advantage >= 0)
    return gain


def _acted(log_p: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """The policy that acted; NaN: the rollout is the current policy's own."""
    old = columns["old_log_prob"]
    return torch.where(torch.isnan(old), log_p.detach(), old)


def _ratio(objective: Policy | Grpo, log_p: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    ratio = torch.exp(log_p) / torch.exp(_acted(log_p, columns))
    if objective.ratio == "sequence":
        ratio = torch.ones_like(ratio) * torch.prod(ratio) ** (1 / len(ratio))
    return ratio


def _weight(objective: Policy | Grpo, weight: Tensor) -> Tensor:
    """Of each token of a sequence, for the engine. weight: acted / engine of each."""
    low, high = objective.importance_floor, objective.importance_cap
    if high is None:
        return torch.ones_like(weight)
    unit, beyond = objective.correction.split("_")
    if unit == "sequence":
        weight = torch.ones_like(weight) * torch.prod(weight)
    if beyond == "mask":
        return weight * ((low <= weight) & (weight <= high))
    return torch.where(weight > high, high, torch.where(weight < low, low, weight))


def _vespo(
    objective: Policy | Grpo, log_ratios: list[float], weights: list[float], advantages: list[float]
) -> list[float]:
    """w^k e^(l (1 - w)) of each token, w that of the sequence."""
    total = 0.0
    for log_ratio, weight in zip(log_ratios, weights, strict=True):
        total += min(max(log_ratio, -20.0), 20.0) + math.log(min(max(weight, 1e-8), math.exp(20.0)))
    w = min(max(math.exp(min(total, 20.0)), 1e-8), math.exp(20.0))
    found = []
    for advantage in advantages:
        k, slope = objective.vespo_k_pos, objective.vespo_lambda_pos
        if advantage < 0:
            k, slope = objective.vespo_k_neg, objective.vespo_lambda_neg
        found.append(w**k * math.exp(slope * (1 - w)))
    return found


def _gain_of_ratio(objective: Policy | Grpo, ratio: Tensor, advantage: Tensor, log_p: Tensor) -> Tensor:
    if objective.loss == "sapo":
        above, below = objective.sapo_temperature_pos, objective.sapo_temperature_neg
        t = torch.full_like(ratio, below)
        t[advantage > 0] = above
        return advantage * 4 / (t * (1 + torch.exp(t * (1 - ratio))))
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    held = torch.where(ratio > high, high, torch.where(ratio < low, low, ratio))
    if objective.loss == "cispo":
        return held.detach() * advantage * log_p
    if objective.delta is not None:
        ratio = torch.where(ratio > objective.delta, objective.delta, ratio)
    # What is gained is the smaller of both, what is lost the larger.
    lesser, greater = torch.where(ratio < held, ratio, held), torch.where(ratio > held, ratio, held)
    return advantage * torch.where(advantage > 0, lesser, greater)


def _divergence(estimate: str, log_p: Tensor, log_ref: Tensor) -> Tensor:
    """k1, k2 or k3 of Schulman's note, with r = ref / pi: -log r, (log r)^2 / 2, r - 1 - log r."""
    r = torch.exp(log_ref) / torch.exp(log_p)
    return {"k1": -torch.log(r), "k2": torch.log(r) ** 2 / 2, "k3": r - 1 - (log_ref - log_p)}[estimate]
