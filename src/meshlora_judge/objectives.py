"""The judge's own losses, from whole logits on one process, written from the papers' equations.

The routers' load-balancing loss is by the function of transformers, over all tokens of an optimizer step at once. Does
not own: formulas of rollouts and preferences (`meshlora_judge.formulas`); parameters (`meshlora_ground.objectives`),
which both sides share. Nothing of `run.formulas` or `run.heads` is used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora_ground.model_class import own_class
from meshlora_ground.objective import Objective, Sft
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.objectives.labels import Classify, ClassifyTokens, Embed
from meshlora_ground.objectives.policies import Grpo, Policy
from meshlora_ground.objectives.preferences import Dpo, Kto, Orpo, Simpo
from meshlora_ground.objectives.rewards import Reward
from meshlora_judge.batches import UNTRAINED, MicroBatch
from meshlora_judge.formulas.distillation import distill
from meshlora_judge.formulas.pairs import dpo
from meshlora_judge.formulas.policies import policy
from meshlora_judge.formulas.preferences import kto, orpo, reward, simpo


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
    if isinstance(objective, Reward):
        return reward(objective, logits.float(), batch)
    options = {} if point is None else {"point": point}
    return _LOSSES[type(objective)](objective, logits, batch, base, is_training, **options)


def _sft(objective: Sft, logits: Tensor, batch: MicroBatch, base: None, is_training: bool) -> Tensor:
    each = F.cross_entropy(
        logits.flatten(0, 1).float(),
        batch.labels.flatten(),
        ignore_index=UNTRAINED,
        reduction="none",
        label_smoothing=objective.label_smoothing if is_training else 0.0,
    )
    each = each[batch.labels.flatten() != UNTRAINED]
    # Weighted by the probability of the token, which has no gradient; evaluations are of the likelihood.
    return torch.exp(-each.detach()) * each if objective.loss == "dft" and is_training else each


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


_LOSSES: dict[type, Any] = {
    Sft: _sft,
    Policy: policy,
    Grpo: policy,
    Dpo: dpo,
    Orpo: orpo,
    Simpo: simpo,
    Kto: kto,
    Distill: distill,
}


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
    together = tuple(map(torch.cat, zip(*logits, strict=True)))
    mask = torch.cat([mask.flatten() for mask in masks]).unsqueeze(0)
    # A composite has the numbers in the configuration of its text part alone.
    of = model if hasattr(model, "num_experts") else model.config.get_text_config()
    loss: Tensor = function(together, of.num_experts, of.num_experts_per_tok, mask)
    return loss
