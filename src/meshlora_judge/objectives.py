"""The judge's own losses, from whole logits on one process, written from the papers' equations.

The routers' load-balancing loss is by the function of transformers, over all tokens of an optimizer step at once. Does
not own: parameters (`meshlora_ground.objective`), which both sides share. Nothing of `run.objectives` or `run.heads` is
used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora_ground.model_class import own_class
from meshlora_ground.objective import Classify, ClassifyTokens, Dpo, Embed, Grpo, Kto, Objective, Orpo, Policy, Sft
from meshlora_judge.batches import UNTRAINED, MicroBatch


def losses(
    objective: Objective,
    logits: Tensor,
    batch: MicroBatch,
    base: Tensor | None,
    *,
    is_training: bool,
    point: Tensor | None = None,
) -> Tensor:
    """Losses before averaging: one per trained token, pair or record. logits, base (the frozen base's): `[B, S, V]`.

    point: `[]`, the reference point of rewards over the whole step, for objectives that have one.
    """
    if isinstance(objective, Classify | ClassifyTokens):
        return _classify(objective, logits.float(), batch)
    options = {} if point is None else {"point": point}
    return _LOSSES[type(objective)](objective, logits, batch, base, is_training, **options)


def gained(logits: Tensor, base: Tensor, batch: MicroBatch) -> Tensor:
    """log p(row) - log p_base(row), over the trained tokens of each row: `[B]`."""
    return _of_rows(logits, batch) - _of_rows(base, batch)


def _sft(objective: Sft, logits: Tensor, batch: MicroBatch, base: None, is_training: bool) -> Tensor:
    each = F.cross_entropy(
        logits.flatten(0, 1).float(),
        batch.labels.flatten(),
        ignore_index=UNTRAINED,
        reduction="none",
        label_smoothing=objective.label_smoothing if is_training else 0.0,
    )
    return each[batch.labels.flatten() != UNTRAINED]


def _policy(
    objective: Policy | Grpo, logits: Tensor, batch: MicroBatch, base: Tensor | None, is_training: bool
) -> Tensor:
    """One loss per trained token, or per sequence."""
    found = list[Tensor]()
    of_labels, of_base = _of_labels(logits, batch.labels), None
    if base is not None:
        of_base = _of_labels(base, batch.labels)
    for row in range(len(logits)):
        own = batch.labels[row] != UNTRAINED
        log_p = of_labels[row][own]
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


def _dpo(objective: Dpo, logits: Tensor, batch: MicroBatch, base: Tensor | None, is_training: bool) -> Tensor:
    assert base is not None
    smoothing = objective.label_smoothing if is_training else 0.0
    pairs = []
    for better, worse in gained(logits, base, batch).view(-1, 2):
        wins = torch.sigmoid(objective.beta * (better - worse))
        pairs.append(-(1 - smoothing) * wins.log() - smoothing * (1 - wins).log())
    return torch.stack(pairs)


def _orpo(objective: Orpo, logits: Tensor, batch: MicroBatch, base: None, is_training: bool) -> Tensor:
    means = _of_rows(logits, batch) / (batch.labels != UNTRAINED).sum(1)
    pairs = []
    for better, worse in means.view(-1, 2):
        odds, other = (p / (1 - p) for p in (better.exp(), worse.exp()))
        pairs.append(-better - objective.beta * torch.log(odds / (odds + other)))  # sigmoid of the log of odds / other
    return torch.stack(pairs)


def _kto(
    objective: Kto, logits: Tensor, batch: MicroBatch, base: Tensor | None, is_training: bool, point: Tensor
) -> Tensor:
    assert base is not None
    records = []
    for row, reward in enumerate(gained(logits, base, batch)):
        (label,) = set(batch.columns["desirable"][row][batch.labels[row] != UNTRAINED].tolist())
        if label == 1:
            records.append(objective.desirable_weight * (1 - torch.sigmoid(objective.beta * (reward - point))))
        else:
            records.append(objective.undesirable_weight * (1 - torch.sigmoid(objective.beta * (point - reward))))
    return torch.stack(records)


def _classify(objective: Classify | ClassifyTokens, outputs: Tensor, batch: MicroBatch) -> Tensor:
    """outputs: `[B, K]`, or of tokens `[B, S, K]`."""
    if isinstance(objective, ClassifyTokens):
        is_labelled = batch.labels != UNTRAINED
        return _surprise(outputs[is_labelled], batch.columns["label"][is_labelled])
    assert batch.targets is not None
    targets = batch.targets.to(outputs.dtype)
    if objective.problem == "single":
        return _surprise(outputs, targets[:, 0])
    if objective.problem == "regression":
        return ((outputs - targets) ** 2).sum(1) / targets.shape[1]
    # log (1 + e^-y) of a label that a text has, log (1 + e^y) of one that it has not
    return F.softplus(torch.where(targets > 0, -outputs, outputs)).sum(1) / targets.shape[1]


def _surprise(outputs: Tensor, numbers: Tensor) -> Tensor:
    """-log softmax at the label `numbers[i]` of each row of `outputs`."""
    own = torch.stack([row[int(number)] for row, number in zip(outputs, numbers, strict=True)])
    return outputs.logsumexp(1) - own


def embeddings(objective: Embed, hidden: Tensor, batch: MicroBatch) -> Tensor:
    """Hidden states `[B, S, H]` -> embeddings `[B, H]`, row by row, without the padding."""
    found = []
    for states, mask in zip(hidden.float(), batch.attention_mask, strict=True):
        own = states[mask == 1]
        vector = {"mean": own.mean(0), "last": own[-1], "cls": own[0]}[objective.pooling]
        if objective.normalize:
            vector = vector / vector.square().sum().sqrt()
        found.append(vector)
    return torch.stack(found)


def contrast(objective: Embed, texts: Tensor, each: int) -> Tensor:
    """InfoNCE of each anchor, `[N]`. texts: `[N*each, H]`: anchor, positive, negatives, of one record after another."""
    others = [row for row in range(len(texts)) if row % each]
    losses = []
    for anchor in range(0, len(texts), each):
        scores = torch.stack([texts[anchor] @ texts[other] for other in others]) / objective.temperature
        losses.append(scores.logsumexp(0) - scores[others.index(anchor + 1)])
    return torch.stack(losses)


_LOSSES: dict[type, Any] = {Sft: _sft, Policy: _policy, Grpo: _policy, Dpo: _dpo, Orpo: _orpo, Kto: _kto}


def _of_rows(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Sum of log p over the trained tokens of each row, `[B]`."""
    log_p = _of_labels(logits, batch.labels)
    return torch.stack([row[labels != UNTRAINED].sum() for row, labels in zip(log_p, batch.labels, strict=True)])


def _of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """log p of each label, `[B, S]`; untrained positions get that of token 0."""
    log_softmax = logits.float().log_softmax(-1)
    return log_softmax.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def has_load_balancing(config: Any) -> bool:
    """Whether transformers has a load-balancing loss for models of this configuration."""
    cls = own_class(config)
    has_coef = getattr(config.get_text_config(), "router_aux_loss_coef", None) is not None
    return cls is not None and has_coef and hasattr(sys.modules[cls.__module__], "load_balancing_loss_func")


def load_balancing_loss(model: Any, logits: Sequence[tuple[Tensor, ...]], masks: Sequence[Tensor]) -> Tensor:
    """The load-balancing loss. logits: per micro-batch, per layer `[T, E]`. masks: attention masks `[B, S]`.

    model: the causal LM of transformers, without PEFT's wrapper.
    """
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    together = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    mask = torch.cat([mask.flatten() for mask in masks]).unsqueeze(0)
    # A composite has the numbers in the configuration of its text part alone.
    of = model if hasattr(model, "num_experts") else model.config.get_text_config()
    loss: Tensor = function(together, of.num_experts, of.num_experts_per_tok, mask)
    return loss
