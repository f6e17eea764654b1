"""The judge's own losses, from whole logits on one process, written from the papers' equations.

Owns: cross-entropy, PPO's clipped objective with an estimate of the divergence from the base, DPO. Nothing of
`train.objectives` is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.oracle.batches import UNTRAINED, MicroBatch


@dataclass(frozen=True)
class Objective:
    """What is made of logits. name: sft, policy or dpo; the rest as in a run file."""

    name: str = "sft"
    label_smoothing: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    dpo_beta: float = 0.1

    @property
    def needs_base(self) -> bool:
        """Whether the frozen base is asked too."""
        return self.name == "dpo" or (self.name == "policy" and self.kl_coef > 0)

    def count(self, batch: MicroBatch) -> int:
        """What the loss is a mean over: trained tokens, or pairs."""
        return len(batch.labels) // 2 if self.name == "dpo" else batch.num_tokens

    def loss_sum(self, logits: Tensor, batch: MicroBatch, base: Tensor | None, *, is_training: bool) -> Tensor:
        """Summed over what `count` counts. logits: `[B, S, V]`; base: those of the frozen base."""
        smoothing = self.label_smoothing if is_training else 0.0
        if self.name == "sft":
            return F.cross_entropy(
                logits.flatten(0, 1).float(),
                batch.labels.flatten(),
                ignore_index=UNTRAINED,
                reduction="sum",
                label_smoothing=smoothing,
            )
        is_trained = batch.labels != UNTRAINED
        log_p = _of_labels(logits, batch.labels)
        log_ref = None if base is None else _of_labels(base, batch.labels)
        if self.name == "policy":
            return self._policy(log_p[is_trained], None if log_ref is None else log_ref[is_trained], batch, is_trained)
        assert log_ref is not None
        total = log_p.new_zeros(())
        for pair in range(0, len(batch.labels), 2):
            better, worse = ((log_p[row] - log_ref[row])[is_trained[row]].sum() for row in (pair, pair + 1))
            wins = torch.sigmoid(self.dpo_beta * (better - worse))
            total = total - (1 - smoothing) * wins.log() - smoothing * (1 - wins).log()
        return total

    def _policy(self, log_p: Tensor, log_ref: Tensor | None, batch: MicroBatch, is_trained: Tensor) -> Tensor:
        advantage, old, weight = (batch.columns[n][is_trained].to(log_p.dtype) for n in _COLUMNS)
        acted = torch.where(torch.isnan(old), log_p.detach(), old)  # not a number: the policy itself has acted
        ratio = torch.exp(log_p - acted)
        low, high = 1 - self.clip_low, 1 + self.clip_high
        # Where the ratio has left the interval to the side that the advantage asks for, there is nothing more to gain.
        is_done = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        gain = torch.where(is_done, torch.where(advantage > 0, high * advantage, low * advantage), ratio * advantage)
        loss = -gain
        if log_ref is not None:
            loss = loss + self.kl_coef * (torch.exp(log_ref) / torch.exp(log_p) - 1 - (log_ref - log_p))
        return (weight * loss).sum()


_COLUMNS = ("advantage", "old_log_prob", "weight")


def _of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """log p of each label, `[B, S]`; of untrained tokens that of token 0."""
    log_softmax = logits.float().log_softmax(-1)
    return log_softmax.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
