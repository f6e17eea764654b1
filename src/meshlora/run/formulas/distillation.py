"""The loss of distillation: the summed divergence from a teacher, without logits of all tokens on any rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshlora.layers.head_loss import Chunks, CrossEntropy
from meshlora.run.distillation.divergence import DivergenceLoss, Hidden
from meshlora.run.distillation.teachers import InContext, recorded, rows_and_head
from meshlora.run.formulas.seen import Sums
from meshlora.run.mismatch import LARGEST, largest_gap, mismatch_sums
from meshlora.train.batch import Batch
from meshlora.train.losses import before_last, to_head
from meshlora_ground.float64 import wide_dtype
from meshlora_ground.objectives.distillation import Distill

_ENGINE = "engine_log_prob"  # a column


def distilled(objective: Distill, model: Any, batch: Batch, teacher: Hidden | InContext | None) -> tuple[Tensor, Sums]:
    """Sum over this rank's trained tokens of D(teacher, student) + cross_entropy * -log p(token).

    D is of the distributions at `temperature`, without a factor of its square, as in TRL (GKD, Agarwal et al., 2024).
    teacher: what it says; None: the batch says it.
    """
    trained = batch.trained
    assert trained is not None
    if (signal := before_last(model, batch)) is not None:
        none = signal.new_zeros(0)
        return signal, _values(objective, none, none, none if _ENGINE in batch.columns else None)
    hidden, head, options = rows_and_head(model, to_head(model, batch))
    if isinstance(teacher, InContext):
        teacher = teacher.of(batch, trained)
    says = recorded(objective, batch, trained) if teacher is None else teacher
    axis, parameters = options["axis"], options["parameters"]
    engine = None
    if _ENGINE in batch.columns:  # the student's own words, as it said them
        engine = batch.held(batch.columns[_ENGINE]).flatten()[trained]
    wide = wide_dtype(hidden.dtype)
    loss = DivergenceLoss.of(axis, options["vocab"], wide, objective, says, engine is not None)
    chunks = Chunks.of(hidden, head, batch.own_labels.flatten(), trained, loss)
    total = CrossEntropy.apply(hidden, chunks, None, torch.is_grad_enabled(), *parameters)
    divergence, nll = loss.found
    return total, _values(objective, divergence, nll, engine)


def _values(objective: Distill, divergence: Tensor, nll: Tensor, engine: Tensor | None) -> Sums:
    """What is reported of each trained token, `[N]` each, summed: on every stage by the same names."""
    values = {"divergence": divergence.sum()}
    if objective.cross_entropy:
        values["nll"] = nll.sum()
    if engine is not None:
        own, sampled = -nll.detach(), engine.to(nll.dtype)
        sums = mismatch_sums(own, sampled, torch.zeros_like(own, dtype=torch.bool))
        values |= {name: value.sum() for name, value in sums.items()}
        gaps = largest_gap(own, sampled)
        values[LARGEST] = gaps.amax() if len(gaps) else gaps.sum()
    return values
