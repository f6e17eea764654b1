"""Objectives: losses from the log-probabilities of a batch, summed over tokens, pairs or records.

Does not own: formulas (`run.formulas`, `run.heads`), their parameters (`meshlora_ground.objectives`), the
log-probabilities (`train.losses`), the records (`reading.rollouts`, `reading.preferences`), the sum over ranks and the
division (`train.gradsync`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.attach import reference_in_use, runtime
from meshlora.comm.collectives import all_reduce_sum
from meshlora.run import heads
from meshlora.run.distillation.divergence import Hidden
from meshlora.run.distillation.teachers import InContext, said, said_in_context
from meshlora.run.entropies import entropy_point
from meshlora.run.formulas.distillation import distilled
from meshlora.run.formulas.policies import policy
from meshlora.run.formulas.preferences import dpo, kto, orpo, simpo
from meshlora.run.formulas.seen import Formula, Seen, Sums
from meshlora.run.heads import Compared
from meshlora.run.mismatch import LARGEST
from meshlora.run.ordered_pairs import ordered_pairs
from meshlora.train.batch import Batch
from meshlora.train.batches import Batching, Masks, Step
from meshlora.train.losses import Rows, batch_log_probabilities, batch_scores, language_model_losses
from meshlora_ground.objective import Objective, Sft
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.objectives.labels import Embed
from meshlora_ground.objectives.policies import Grpo, Policy
from meshlora_ground.objectives.preferences import Dpo, Kto, Orpo, Simpo
from meshlora_ground.tasks import CAUSAL

Point = Tensor | Compared | InContext | None  # the result of `first_pass`
Reference = Tensor | Hidden | None  # the result of `of_reference`


def count(objective: Objective, batch: Batch) -> int:
    """Number of items of this batch in the mean: trained tokens, pairs or records."""
    if objective.per == "token":
        return batch.num_trained_tokens
    return 0 if batch.is_dummy or not batch.counts_rows else len(batch.input_ids) // batch.rows_per_example


def loss_sums(
    objective: Objective, model: Any, batch: Batch, own: Rows, reference: Reference, points: Sequence[Point]
) -> list[tuple[Tensor, Sums]]:
    """(summed loss on the model's device, sums to report) of the rows of each of K adapters in a batch.

    reference: of `of_reference`. points: `first_pass` over the step of each adapter.
    """
    if isinstance(objective, Sft) and (objective.is_summed or not model.training):
        # Neither logits nor log-probabilities of single tokens are materialised.
        smoothing = objective.label_smoothing if model.training else 0.0
        return [(loss, {}) for loss in language_model_losses(model, batch, own, label_smoothing=smoothing)]
    if isinstance(objective, Distill):
        (point,) = points
        teacher = point if isinstance(point, InContext) else reference
        assert not isinstance(teacher, Tensor)
        return [distilled(objective, model, batch, teacher)]
    assert not isinstance(reference, Hidden)
    sizes = [len(rows.labels) for _, rows in own]
    if objective.task != CAUSAL:
        of_each = heads.outputs_of(model, batch).split(sizes)
        every = zip(of_each, own, points, strict=True)
        return [_of_head(objective, outputs, rows, point) for outputs, (_, rows), point in every]
    scores: Sequence[Tensor | None] = [None] * len(own)
    if objective.token_score:
        both = batch_scores(model, batch, own, score=objective.token_score)
        log_ps, scores = (values.split(sizes) for values in both)
    else:
        log_ps = batch_log_probabilities(model, batch, own).split(sizes)
    log_refs = [None] * len(own) if reference is None else reference.split(sizes)
    found: list[tuple[Tensor, Sums]] = []
    for (_, part), log_p, log_ref, point, score in zip(own, log_ps, log_refs, points, scores, strict=True):
        rows = slice(0, 0) if part.is_dummy else slice(None)
        columns = {name: column[rows].to(log_p.dtype) for name, column in part.columns.items()}
        ref, beside = (None if values is None else values[rows] for values in (log_ref, score))
        assert not isinstance(point, Compared | InContext)
        if objective.is_of_step and point is not None:
            point = point[heads.places_of(part)][rows]
        seen = Seen(log_p[rows], ref, part.labels[rows] >= 0, columns, model.training, point, beside)
        losses, values = FORMULAS[type(objective)](objective, seen)
        if not runtime(model).pipeline.is_last:  # the last stage has the loss
            signal = log_p.sum() if score is None else log_p.sum() + score.sum()
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
    # A dummy's forward keeps the collectives of the ranks together; of cp ranks, which have whole texts, one counts.
    factor = int(batch.counts_rows and not batch.is_dummy)
    return factor * losses.sum(), {name: factor * value.detach().sum(0) for name, value in values.items()}


def dft(objective: Sft, seen: Seen) -> tuple[Tensor, Sums]:
    """Dynamic fine-tuning (Wu et al., 2025, equation 9), per token: -sg(pi(t)) log pi(t), sg: without gradient."""
    return -seen.log_p.detach().exp() * seen.log_p, {}


FORMULAS: Mapping[type, Formula] = {
    Sft: dft,
    Policy: policy,
    Grpo: policy,
    Dpo: dpo,
    Orpo: orpo,
    Simpo: simpo,
    Kto: kto,
}


def first_pass(
    objective: Objective, model: Any, batching: Batching, step: Step, masks: Masks = lambda _: contextlib.nullcontext()
) -> Point:
    """What the loss of each example of a step needs of all examples of it, on all ranks; None if nothing.
    masks: around a forward, for the dropout of the step. Collective.
    """
    if isinstance(objective, Distill):
        return said_in_context(objective, model, batching, step) if objective.is_of_step else None
    if isinstance(objective, Policy | Grpo):
        return entropy_point(objective, model, batching, step, masks) if objective.has_first_pass else None
    if isinstance(objective, Dpo):
        given = (model, batching, step, masks, reference_log_probabilities)
        return ordered_pairs(objective, *given) if objective.is_of_step else None
    if isinstance(objective, Embed):
        return heads.compare_step(objective, model, batching, step, masks)
    return reference_point(objective, model, batching, step)


@torch.no_grad()
def reference_point(objective: Objective, model: Any, batching: Batching, step: Step) -> Tensor | None:
    """`[]`: the mean of log pi(y) - log ref(y) over the untrained rows of the examples of `step` on all dp ranks, at
    least 0; None if the objective has no such point. Without dropout and gradient. Collective.

    The mean is over the whole step: one over a micro-batch or a rank would depend on the topology.
    """
    if objective.trained_row is None or not objective.has_first_pass:
        return None
    mesh = runtime(model).mesh
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    is_training = model.training
    model.eval()
    for batch in dataclasses.replace(batching, only=1 - objective.trained_row).batches(*step):
        gain = gained(model, batch).double() * batch.counts_rows
        sums += torch.stack([gain, sums.new_tensor(count(objective, batch) * mesh.is_counted)])
    model.train(is_training)
    total, number = all_reduce_sum(sums, mesh.losses)  # the same on all ranks: it enters every loss
    return (total / number).clamp(min=0)


def of_reference(objective: Objective, model: Any, batch: Batch) -> Reference:
    """What a frozen policy or a teacher says of a batch: log-probabilities `[B, S]`, or what is compared with the
    student's; None: the loss needs nothing of it.
    """
    if isinstance(objective, Distill):
        return said(objective, model, batch)
    return reference_log_probabilities(model, batch) if objective.needs_base else None


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
