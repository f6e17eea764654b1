"""The judge's policy gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshlora_ground.objectives.policies import Grpo, Policy
from meshlora_judge.batches import UNTRAINED, MicroBatch
from meshlora_judge.formulas.labels import of_labels


def policy(
    objective: Policy | Grpo, logits: Tensor, batch: MicroBatch, base: Tensor | None, is_training: bool
) -> Tensor:
    """One loss per trained token, or per sequence."""
    found = list[Tensor]()
    of_policy, of_base = of_labels(logits, batch.labels), None
    if base is not None:
        of_base = of_labels(base, batch.labels)
    for row in range(len(logits)):
        own = batch.labels[row] != UNTRAINED
        log_p = of_policy[row][own]
        columns = {name: column[row][own].to(log_p.dtype) for name, column in batch.columns.items()}
        gain = _gain(objective, log_p, columns)
        if of_base is not None:
            gain = gain - objective.kl_coef * _divergence(objective.kl, log_p, of_base[row][own])
        if objective.entropy_coef:
            p = logits[row][own].float().softmax(-1)
            gain = gain - objective.entropy_coef * (p * p.log()).sum(-1)
        gain = columns["weight"] * gain
        if objective.mean_over == "token":
            found += (-gain).unbind()
        else:
            found.append(-gain.sum() / (objective.max_completion_length or len(gain)))
    return torch.stack(found)


def _gain(objective: Policy | Grpo, log_p: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """What each token of a sequence gains, weighted for the engine that sampled it."""
    advantage, old, engine = columns["advantage"], columns["old_log_prob"], columns["engine_log_prob"]
    acted = torch.where(torch.isnan(old), log_p.detach(), old)  # NaN: the rollout is the current policy's own
    ratio = torch.exp(log_p) / torch.exp(acted)
    if objective.ratio == "sequence":
        ratio = torch.ones_like(ratio) * torch.prod(ratio) ** (1 / len(ratio))
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    if objective.loss == "cispo":
        held = torch.where(ratio > high, high, torch.where(ratio < low, low, ratio))
        gain = held.detach() * advantage * log_p
    else:  # clipped only where the ratio has left the interval in the direction of the advantage
        is_done = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        gain = torch.where(is_done, torch.where(advantage > 0, high * advantage, low * advantage), ratio * advantage)
    if objective.importance_cap is None:
        return gain
    weight = torch.exp(acted) / torch.exp(torch.where(torch.isnan(engine), acted, engine))
    return torch.where(weight > objective.importance_cap, objective.importance_cap, weight) * gain


def _divergence(estimate: str, log_p: Tensor, log_ref: Tensor) -> Tensor:
    """k1, k2 or k3 of Schulman's note, with r = ref / pi: -log r, (log r)^2 / 2, r - 1 - log r."""
    r = torch.exp(log_ref) / torch.exp(log_p)
    return {"k1": -torch.log(r), "k2": torch.log(r) ** 2 / 2, "k3": r - 1 - (log_ref - log_p)}[estimate]
