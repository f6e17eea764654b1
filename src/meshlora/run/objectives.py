"""Objectives: losses from the log-probabilities of a batch, summed over tokens, pairs or records.

Owns: the formula of each objective. Does not own: their parameters (`meshlora_ground.objective`), the log-probabilities
(`train.losses`), the records (`reading.rollouts`, `reading.preferences`), the sum over ranks and the division
(`train.gradsync`).

Legend: pi the model with its adapter, ref the frozen policy beside it; t trained tokens, y a whole completion.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.adapter.attach import reference_in_use, runtime
from meshlora.comm.collectives import all_reduce_sum
from meshlora.run import heads
from meshlora.run.heads import Compared
from meshlora.run.mismatch import LARGEST, largest_gap, mismatch_sums
from meshlora.train.batch import Batch
from meshlora.train.batches import Batching
from meshlora.train.losses import Rows, batch_log_probabilities, batch_scores, language_model_losses
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.objective import Dpo, Embed, Grpo, Kto, Objective, Orpo, Policy, Sft
from meshlora_ground.tasks import CAUSAL

Sums = Mapping[str, Tensor]  # name -> a sum, reported as a mean over the step; of LARGEST the largest value
Point = Tensor | Compared | None  # the result of `first_pass`


@dataclass(frozen=True)
class Seen:
    """The arguments of a formula; a dummy batch has no rows.

    log_p, log_ref: log-probabilities `[B, S]` of pi and, if the objective needs them, of ref; 0 where untrained.
    is_trained: bool `[B, S]`. columns: name -> `[B, S]`, from the records. is_training: False in evaluation.
    point: `[]`, the reference point of the step, if the objective has one. entropy: `[B, S]`, if it needs that.
    """

    log_p: Tensor
    log_ref: Tensor | None
    is_trained: Tensor
    columns: Mapping[str, Tensor]
    is_training: bool
    point: Tensor | None = None
    entropy: Tensor | None = None


Formula = Callable[[Any, Seen], tuple[Tensor, Sums]]  # -> (losses, values to report), both to be summed


def count(objective: Objective, batch: Batch) -> int:
    """Number of items of this batch in the mean: trained tokens, pairs or records."""
    if objective.per == "token":
        return batch.num_trained_tokens
    return 0 if batch.is_dummy or not batch.counts_rows else len(batch.input_ids) // batch.rows_per_example


def loss_sums(
    objective: Objective, model: Any, batch: Batch, own: Rows, reference: Tensor | None, points: Sequence[Point]
) -> list[tuple[Tensor, Sums]]:
    """(summed loss on the model's device, sums to report) of the rows of each of K adapters in a batch.

    reference: log-probabilities `[B, S]` of ref, if the objective needs them. points: `first_pass` over the step
    of each adapter.
    """
    if isinstance(objective, Sft):  # neither logits nor log-probabilities of single tokens are materialised
        smoothing = objective.label_smoothing if model.training else 0.0
        return [(loss, {}) for loss in language_model_losses(model, batch, own, label_smoothing=smoothing)]
    sizes = [len(rows.labels) for _, rows in own]
    if objective.task != CAUSAL:
        of_each = heads.outputs_of(model, batch).split(sizes)
        every = zip(of_each, own, points, strict=True)
        return [_of_head(objective, outputs, rows, point) for outputs, (_, rows), point in every]
    entropies: Sequence[Tensor | None] = [None] * len(own)
    if objective.needs_entropy:
        log_ps, entropies = (values.split(sizes) for values in batch_scores(model, batch, own))
    else:
        log_ps = batch_log_probabilities(model, batch, own).split(sizes)
    log_refs = [None] * len(own) if reference is None else reference.split(sizes)
    found: list[tuple[Tensor, Sums]] = []
    for (_, part), log_p, log_ref, point, entropy in zip(own, log_ps, log_refs, points, entropies, strict=True):
        rows = slice(0, 0) if part.is_dummy else slice(None)
        columns = {name: column[rows].to(log_p.dtype) for name, column in part.columns.items()}
        ref, spread = (None if values is None else values[rows] for values in (log_ref, entropy))
        assert not isinstance(point, Compared)
        seen = Seen(log_p[rows], ref, part.labels[rows] >= 0, columns, model.training, point, spread)
        losses, values = FORMULAS[type(objective)](objective, seen)
        if not runtime(model).pipeline.is_last:  # the last stage has the loss
            signal = log_p.sum() if entropy is None else log_p.sum() + entropy.sum()
            found.append((signal, {name: torch.zeros_like(value.sum()) for name, value in values.items()}))
            continue
        # All cp ranks know all log-probabilities: one counts them, and the others' are in its gradient.
        factor = 1 if part.counts_rows else 0
        found.append((factor * losses.sum(), {name: factor * _total(name, value) for name, value in values.items()}))
    return found


def _total(name: str, values: Tensor) -> Tensor:
    """The sum of `values`, or the largest, of a micro-batch; a dummy has none."""
    values = values.detach()
    return values.amax() if name == LARGEST and values.numel() else values.sum()


def _of_head(objective: Objective, outputs: Tensor, batch: Batch, point: Point) -> tuple[Tensor, Sums]:
    losses, values = heads.FORMULAS[type(objective)](objective, outputs, batch, point)
    factor = 0 if batch.is_dummy else 1  # its forward keeps the collectives of the ranks together
    return factor * losses.sum(), {name: factor * value.detach().sum(0) for name, value in values.items()}


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


def dpo(objective: Dpo, seen: Seen) -> tuple[Tensor, Sums]:
    """Direct preference optimisation over pairs (Rafailov et al., 2023, equation 7), per pair.

    loss = -(1-e) log sigmoid(m) - e log sigmoid(-m), m = beta (log pi(y+)/ref(y+) - log pi(y-)/ref(y-)),
    e the label_smoothing.
    """
    assert seen.log_ref is not None
    rewards = objective.beta * (seen.log_p - seen.log_ref).sum(1)  # untrained tokens have 0 in both
    margin = rewards[0::2] - rewards[1::2]
    e = objective.label_smoothing if seen.is_training else 0.0
    loss = -(1 - e) * F.logsigmoid(margin) - e * F.logsigmoid(-margin)
    return loss, {"accuracy": (margin > 0).to(margin.dtype), "margin": margin}


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
    w (1 - sigmoid(beta (z - r))) of an undesirable one, each with its own weight w.
    """
    assert seen.log_ref is not None
    assert seen.point is not None
    sign = seen.columns["desirable"].sum(1).sign()  # the column has +1 or -1 at each trained token
    gain = (seen.log_p - seen.log_ref).sum(1) - seen.point.to(sign.dtype)
    weight = torch.full_like(sign, objective.undesirable_weight).masked_fill(sign > 0, objective.desirable_weight)
    loss = weight * torch.sigmoid(-objective.beta * sign * gain)  # 1 - sigmoid(x) is sigmoid(-x)
    return loss, {"accuracy": (sign * gain > 0).to(sign.dtype), "kl": seen.point.expand_as(sign)}


FORMULAS: Mapping[type, Formula] = {Policy: policy, Grpo: policy, Dpo: dpo, Orpo: orpo, Kto: kto}


def first_pass(
    objective: Objective,
    model: Any,
    batching: Batching,
    data: TokenizedDataset,
    indices: np.ndarray,
    masks: Callable[[Batch], AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
) -> Point:
    """What the loss of each example of a step needs of all examples `indices` of it, on all ranks; None if nothing.
    masks: around a forward, for the dropout of the step. Collective.
    """
    if objective.is_of_step:
        assert isinstance(objective, Embed)
        return heads.compare_step(objective, model, batching, data, indices, masks)
    return reference_point(objective, model, batching, data, indices)


@torch.no_grad()
def reference_point(
    objective: Objective, model: Any, batching: Batching, data: TokenizedDataset, indices: np.ndarray
) -> Tensor | None:
    """`[]`: the mean of log pi(y) - log ref(y) over the untrained rows of the examples `indices` on all dp ranks, at
    least 0; None if the objective has no such point. Without dropout and gradient. Collective.

    The mean is over the whole step: one over a micro-batch or a rank would depend on the topology.
    """
    if objective.trained_row is None:
        return None
    mesh = runtime(model).mesh
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    is_training = model.training
    model.eval()
    for batch in dataclasses.replace(batching, only=1 - objective.trained_row).batches(data, indices):
        gain = gained(model, batch).double() * batch.counts_rows
        sums += torch.stack([gain, sums.new_tensor(count(objective, batch) * mesh.is_counted)])
    model.train(is_training)
    total, number = all_reduce_sum(sums, mesh.losses)  # the same on all ranks: it enters every loss
    return (total / number).clamp(min=0)


def gained(model: Any, batch: Batch) -> Tensor:
    """`[]`: log pi - log ref, summed over the trained tokens of a batch."""
    return (batch_log_probabilities(model, batch) - reference_log_probabilities(model, batch)).sum()


@torch.no_grad()
def reference_log_probabilities(model: Any, batch: Batch) -> Tensor:
    """`batch_log_probabilities` of the frozen policies that the adapters in use are compared with, without dropout.

    There is no second model: one of its adapters is used for the call, or none.
    """
    is_training = model.training
    model.eval()  # the policy compared with is a fixed one, without dropout
    try:
        with reference_in_use(model):
            return batch_log_probabilities(model, batch)
    finally:
        model.train(is_training)
