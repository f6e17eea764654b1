"""Faults of distillation: what the teacher is, what it sees, and how far from it the student is."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.attach import disable_adapter
from meshlora.run import objectives
from meshlora.run.distillation import divergence, teachers
from meshlora.run.distillation.divergence import DivergenceLoss, Hidden, Likeliest
from meshlora.run.formulas import distillation
from meshlora.verify.faults.fault import after, around, configured, instead_of, stating
from meshlora.verify.features import Feature


@after(teachers, "_of_model", needs={Feature.RUNNING_TEACHER})
def teacher_of_next_token(found: Hidden, *_: Any) -> Hidden:
    """student and teacher are compared at the same token"""
    return found._replace(rows=found.rows.roll(-1, 0))


@after(distillation, "recorded", needs={Feature.RECORDED_TEACHER})
def record_of_next_token(found: Likeliest, *_: Any) -> Likeliest:
    """a record says of each token what the teacher says there"""
    return Likeliest(found.ids.roll(-1, 0), found.log_p.roll(-1, 0))


@around(divergence, "terms", needs={Feature.DISTILLED})
def other_divergence(original: Any, objective: Any, log_p: Tensor, log_q: Tensor) -> Any:
    """the divergence is the one that is configured, not from the student where it is to be from the teacher"""
    other = {"forward_kl": "reverse_kl", "reverse_kl": "forward_kl", "jsd": "jsd"}[objective.divergence]
    beta = 1 - objective.beta if other == "jsd" else objective.beta
    return original(replace(objective, divergence=other, beta=beta), log_p, log_q)


@around(DivergenceLoss, "of_teacher", needs={Feature.TEMPERED})
def teacher_not_tempered(original: Any, self: Any, *seen: Any) -> Any:
    """the temperature is that of both distributions"""
    return original(replace(self, objective=replace(self.objective, temperature=1.0)), *seen)


@around(DivergenceLoss, "__call__", needs={Feature.TEMPERED})
def gradient_not_tempered(original: Any, self: Any, logits: Tensor, targets: Any, gradient: Tensor, sums: Any) -> None:
    """the gradient of a tempered divergence is divided by the temperature, and by it once"""
    original(self, logits, targets, gradient, sums)
    gradient.mul_(self.objective.temperature)


@around(DivergenceLoss, "likeliest", needs={Feature.LIKELIEST, Feature.TP})
def likeliest_of_own_vocabulary(original: Any, self: Any, log_p: Tensor, number: int) -> Likeliest:
    """the likeliest tokens are those of the vocabulary of all ranks"""
    values, ids = log_p.topk(number, 1)
    return Likeliest(ids + self.axis.rank * log_p.shape[1], values)


@instead_of(divergence, "with_rest", needs={Feature.RECORDED_TEACHER})
def rest_forgotten(log_p: Tensor) -> Tensor:
    """tokens outside of a record have what is left, together"""
    return torch.cat([log_p, torch.full_like(log_p[:, :1], -100.0)], 1)


mixture_of_equal_shares = around(divergence, "terms", needs={Feature.MIXED})(
    configured("the teacher has its share of the mixture as configured", beta=0.5)
)
teacher_is_the_student = around(teachers, "_of_model", needs={Feature.SECOND_MODEL})(
    configured("the teacher is another model", teacher="itself")
)
cross_entropy_doubled = around(objectives, "distilled", needs={Feature.TOLD})(
    configured("the cross-entropy weighs as configured", cross_entropy=lambda objective: 2 * objective.cross_entropy)
)
teacher_with_adapter_on = instead_of(teachers, "reference_in_use", needs={Feature.TEACHES_ITSELF})(
    stating("the teacher is the frozen policy, not the one that is trained", lambda _: contextlib.nullcontext())
)
teacher_is_base = instead_of(teachers, "reference_in_use", needs={Feature.TEACHES_ITSELF, Feature.REFERENCE})(
    stating("the teacher is the policy that the run starts from, not the base", lambda model: disable_adapter(model))
)
context_not_seen = instead_of(teachers, "with_context", needs={Feature.IN_CONTEXT})(
    stating("the teacher sees the context", lambda batching: replace(batching, only=0))
)
divergence_of_own_vocabulary = instead_of(DivergenceLoss, "_summed", needs={Feature.DISTILLED, Feature.TP})(
    stating("a divergence is summed over the vocabulary of all ranks", lambda self, values: values)
)
