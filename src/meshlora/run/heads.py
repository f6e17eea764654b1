"""Objectives of models with another head than a vocabulary: labels of texts or words, and embeddings.

Owns: their formulas, from a model's outputs, and the first pass over a step that a comparison of all its texts needs.
Does not own: parameters (`meshlora_ground.objective`), records (`reading.labelled`), sums over micro-batches and ranks
(`run.objectives`, `train.gradsync`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_reduce_sum
from meshlora.run.formulas.preferences import reward
from meshlora.train.batch import IGNORED, Batch
from meshlora.train.batches import Batching, Masks, Step
from meshlora_ground.masks import POSITION_BITS
from meshlora_ground.objectives.labels import Classify, ClassifyTokens, Embed
from meshlora_ground.objectives.rewards import Reward
from meshlora_ground.tasks import CAUSAL, task_of

Values = Mapping[str, Tensor]
COUNTS = "counts per label"  # a vector, only in evaluations


@dataclass(frozen=True)
class Compared:
    """The texts of a step, compared with each other: what a first pass over all of them tells each.

    losses, hits: `[N]`, of each anchor: its loss, and 1 if its own positive is the most similar of all. gradient:
    `[N*R, H]`, of the sum of all losses, by the embedding of each text.
    """

    losses: Tensor
    hits: Tensor
    gradient: Tensor


def set_padding(model: Any, pad_token_id: int) -> None:
    """Tell a model of another task the padding token of its batches, whatever its configuration says: decoders look for
    the last token of a text with it.
    """
    if task_of(model.config) != CAUSAL:
        model.config.get_text_config().pad_token_id = pad_token_id


def outputs_of(model: Any, batch: Batch) -> Tensor:
    """Outputs of the model's own head, `[B, K]` of texts or `[B, S, K]` of words, or hidden states `[B, S, H]`; in
    float32, or float64 inside the lift.
    """
    if batch.order is not None:
        runtime(model).context.next(batch.order)
    found = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **batch.more)
    outputs: Tensor = found.logits if "logits" in found else found.last_hidden_state
    return outputs.float()


def means(sums: Mapping[str, Tensor], number: float) -> dict[str, float]:
    """Means of summed statistics over `number` items; of counts per label the mean F1 of the labels that occur."""
    found = {name: float(value) / number for name, value in sums.items() if name != COUNTS}
    if COUNTS in sums:
        right, both = sums[COUNTS].view(2, -1)
        found["macro_f1"] = float((2 * right / both)[both > 0].mean())
    return found


def _counts(predicted: Tensor, numbers: Tensor, size: int) -> Tensor:
    """Of each item, `[N, 2*size]`: which label is right, and how often each is given or predicted."""
    given, guessed = F.one_hot(numbers, size), F.one_hot(predicted, size)
    return torch.cat([given * guessed, given + guessed], 1).double()


def classify(objective: Classify, outputs: Tensor, batch: Batch, _: None) -> tuple[Tensor, Values]:
    """Of each text: cross-entropy, or the mean over K labels of binary cross-entropy or of the squared error."""
    assert batch.targets is not None
    targets = batch.targets.to(outputs.dtype)
    if objective.problem == "single":
        numbers = targets[:, 0].long()
        values = {"accuracy": (outputs.argmax(1) == numbers).to(outputs.dtype)}
        if not torch.is_grad_enabled():
            values[COUNTS] = _counts(outputs.argmax(1), numbers, outputs.shape[1])
        return F.cross_entropy(outputs, numbers, reduction="none"), values
    if objective.problem == "regression":
        return (outputs - targets).square().mean(1), {}
    losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)
    return losses, {"accuracy": ((outputs > 0) == (targets > 0)).to(outputs.dtype).mean(1)}


def classify_tokens(_: ClassifyTokens, outputs: Tensor, batch: Batch, __: None) -> tuple[Tensor, Values]:
    """Cross-entropy of each labelled token, 0 elsewhere."""
    is_labelled = batch.labels != IGNORED
    numbers = batch.columns["label"].long()
    losses = F.cross_entropy(outputs.flatten(0, 1), numbers.flatten(), reduction="none").view_as(numbers)
    is_right = (outputs.argmax(2) == numbers) & is_labelled
    values = {"accuracy": is_right.sum(1).to(losses.dtype)}
    if not torch.is_grad_enabled():
        counts = _counts(outputs.argmax(2).flatten(), numbers.flatten(), outputs.shape[2])
        values[COUNTS] = counts * is_labelled.flatten().unsqueeze(1)
    return torch.where(is_labelled, losses, 0.0), values


def embed(objective: Embed, outputs: Tensor, batch: Batch, compared: Compared) -> tuple[Tensor, Values]:
    """Of each anchor its loss, which a first pass has found, with the gradient of all losses of the step by the
    embeddings of this batch: their backward is the chain rule's second half (GradCache; Gao et al., 2021).
    """
    rows = places_of(batch)
    surrogate = (embeddings(objective, outputs, batch.attention_mask) * compared.gradient[rows]).sum()
    anchors = rows[:: batch.rows_per_example] // batch.rows_per_example
    losses = compared.losses[anchors]
    zero = surrogate - surrogate.detach()  # its gradient is not
    return torch.cat([losses, zero.unsqueeze(0)]), {"recall_at_1": compared.hits[anchors]}


FORMULAS: Mapping[type, Callable[[Any, Tensor, Batch, Any], tuple[Tensor, Values]]] = {
    Classify: classify,
    ClassifyTokens: classify_tokens,
    Embed: embed,
    Reward: reward,
}


def embeddings(objective: Embed, hidden: Tensor, mask: Tensor) -> Tensor:
    """Hidden states `[B, S, H]` -> embeddings `[B, H]`. mask: `[B, S]`, 0 at the padding, which is on the right."""
    if objective.pooling == "mean":
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        found = (hidden * weights).sum(1) / weights.sum(1)
    else:
        places = mask.sum(1) - 1 if objective.pooling == "last" else torch.zeros_like(mask[:, 0])
        found = hidden[torch.arange(len(hidden), device=hidden.device), places]
    return F.normalize(found, dim=-1) if objective.normalize else found


def info_nce(objective: Embed, texts: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, 1.0 if the positive comes first) of each of N anchors, `[N]`. texts: embeddings `[N, R, H]`, in each row
    an anchor, its positive, its negatives.

    loss = -log softmax(a · c / temperature) at its own positive, over the positives and negatives c of all rows (van
    den Oord et al., 2018, equation 4).
    """
    anchors, others = texts[:, 0], texts[:, 1:]
    candidates = others.transpose(0, 1).flatten(0, 1)  # all positives first
    scores = anchors @ candidates.T / objective.temperature
    own = torch.arange(len(anchors), device=texts.device)
    return F.cross_entropy(scores, own, reduction="none"), (scores.argmax(1) == own).to(texts.dtype)


def places_of(batch: Batch) -> Tensor:
    """int64 `[B]`: the place of each row among all rows of the step."""
    return batch.tokens[:, 0] >> POSITION_BITS  # a token's number holds its row above its position


def compare_step(objective: Embed, model: Any, batching: Batching, step: Step, masks: Masks) -> Compared:
    """Compare the texts of the examples of `step` on all dp ranks. Collective; one sum of `[N*R, H]` over them.

    masks: around a forward, for its dropout, which must be that of the second pass.
    """
    mesh, rows, number = runtime(model).mesh, step[0].rows_per_example, len(step[1])
    whole: Tensor | None = None
    with torch.no_grad():
        for batch in batching.batches(*step):
            with masks(batch):
                own = embeddings(objective, outputs_of(model, batch), batch.attention_mask)
            if whole is None:
                whole = own.new_zeros(number * rows, own.shape[1])
            if not batch.is_dummy and batch.counts_rows:
                whole[places_of(batch)] = own
    assert whole is not None
    with torch.enable_grad():
        # Each rank has filled its own rows, and zeros elsewhere: the sum puts them together.
        every = all_reduce_sum(whole, mesh.data).requires_grad_()
        losses, hits = info_nce(objective, every.view(number, rows, -1))
        (gradient,) = torch.autograd.grad(losses.sum(), every)
    return Compared(losses.detach(), hits, gradient)
