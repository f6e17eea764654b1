"""Objectives: what is made of the log-probabilities of a batch, as a sum over what a step is divided by.

Owns: supervised fine-tuning, the clipped policy gradient, direct preference optimisation. Does not own: where the
log-probabilities come from (`train.losses`), the records (`data.rollouts`, `data.preferences`), the sum over ranks and
the division (`train.gradsync`).

Legend: pi the model with its adapter, ref the frozen base without; t trained tokens, y a whole completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.adapter.manage import disable_adapter
from meshlora.config import TrainConfig
from meshlora.data import Batch
from meshlora.train.losses import language_model_loss, log_probabilities

Sums = Mapping[str, Tensor]  # name -> a sum whose mean over the step is reported


@dataclass(frozen=True)
class Sft:
    """Cross-entropy of the trained tokens, per token.

    Attributes:
        label_smoothing: e of (1-e) (-log p(label)) + e (-mean log p).
    """

    label_smoothing: float = 0.0
    needs_base: bool = False

    def count(self, batch: Batch) -> int:
        """What the sum over this batch is divided by its share of."""
        return batch.num_trained_tokens

    def loss(self, model: Any, batch: Batch, base: Tensor | None) -> tuple[Tensor, Sums]:
        """(the summed loss of a batch on the model's device, sums to report).

        base: log-probabilities `[B, S]` of the frozen base, where the objective needs them.
        """
        smoothing = self.label_smoothing if model.training else 0.0
        loss = language_model_loss(
            model,
            batch.input_ids,
            batch.attention_mask,
            batch.labels,
            label_smoothing=smoothing,
            position_ids=batch.position_ids,
            trained=batch.trained,
        )
        return loss, {}


@dataclass(frozen=True)
class Policy:
    """Clipped, importance-weighted policy gradient from records, per token (PPO, equation 7).

    loss_t = w_t (-min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) + kl_t)
    rho_t = pi(t) / old(t), with old the policy that wrote the record; kl_t = kl_coef (exp(d) - d - 1),
    d = log ref(t) - log pi(t): an estimate of KL(pi || ref) that is never negative.
    """

    clip_low: float
    clip_high: float
    kl_coef: float

    @property
    def needs_base(self) -> bool:
        """Whether `loss` is given what the frozen base says."""
        return self.kl_coef > 0

    def count(self, batch: Batch) -> int:
        """As of `Sft`."""
        return batch.num_trained_tokens

    def loss(self, model: Any, batch: Batch, base: Tensor | None) -> tuple[Tensor, Sums]:
        """As of `Sft`."""
        log_p = batch_log_probabilities(model, batch)
        advantage, old, weight = (batch.columns[n].to(log_p.dtype) for n in ("advantage", "old_log_prob", "weight"))
        # Without a recorded one (NaN) the policy that is trained wrote the record: the ratio is 1, its gradient is not.
        log_ratio = log_p - torch.where(old.isnan(), log_p.detach(), old)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        sums = {"ratio": ratio, "clip_fraction": (clipped * advantage < ratio * advantage).to(ratio.dtype)}
        if base is not None:
            difference = base - log_p
            kl = difference.exp() - difference - 1
            loss = loss + self.kl_coef * kl
            sums["kl"] = kl
        is_trained = batch.labels >= 0
        # Not an index by the mask: a GPU would have to say how many there are before the host goes on.
        of_trained = {n: torch.where(is_trained, t, 0.0).sum() for n, t in {"": weight * loss, **sums}.items()}
        return of_trained.pop(""), {n: t.detach() for n, t in of_trained.items()}


@dataclass(frozen=True)
class Dpo:
    """Direct preference optimisation over pairs (Rafailov et al., 2023, equation 7), per pair.

    loss = -(1-e) log sigmoid(m) - e log sigmoid(-m), m = beta (log pi(y+)/ref(y+) - log pi(y-)/ref(y-))

    Attributes:
        beta: how closely the policy is held to the base. label_smoothing: e, the share of pairs that are labelled the
            wrong way round.
    """

    beta: float
    label_smoothing: float = 0.0
    needs_base: bool = True

    def count(self, batch: Batch) -> int:
        """As of `Sft`; pairs."""
        return 0 if batch.is_dummy else len(batch.input_ids) // 2

    def loss(self, model: Any, batch: Batch, base: Tensor | None) -> tuple[Tensor, Sums]:
        """As of `Sft`."""
        assert base is not None
        log_p = batch_log_probabilities(model, batch)
        if batch.is_dummy:
            return log_p.sum() * 0, {"accuracy": log_p.new_zeros(()), "margin": log_p.new_zeros(())}
        rewards = self.beta * (log_p - base).sum(1)  # untrained tokens have 0 in both
        margin = rewards[0::2] - rewards[1::2]
        e = self.label_smoothing if model.training else 0.0
        loss = -(1 - e) * F.logsigmoid(margin) - e * F.logsigmoid(-margin)
        won = (margin.detach() > 0).to(margin.dtype)
        return loss.sum(), {"accuracy": won.sum(), "margin": margin.detach().sum()}


Objective = Sft | Policy | Dpo


def objective_of(options: TrainConfig) -> Objective:
    """The objective that a run file asks for."""
    if options.objective == "policy":
        return Policy(options.clip_low, options.clip_high, options.kl_coef)
    if options.objective == "dpo":
        return Dpo(options.dpo_beta, options.label_smoothing)
    return Sft(options.label_smoothing)


def batch_log_probabilities(model: Any, batch: Batch) -> Tensor:
    """What `model` says of the labels: `[B, S]`, 0 where untrained."""
    return log_probabilities(
        model,
        batch.input_ids,
        batch.attention_mask,
        batch.labels,
        position_ids=batch.position_ids,
        trained=batch.trained,
    )


@torch.no_grad()
def base_log_probabilities(model: Any, batch: Batch) -> Tensor:
    """What the frozen base, without the adapter and without dropout, says of the labels: `[B, S]`, 0 where untrained.

    No second model is there: the adapter is off meanwhile.
    """
    is_training = model.training
    model.eval()
    try:
        with disable_adapter(model):
            return batch_log_probabilities(model, batch)
    finally:
        model.train(is_training)
