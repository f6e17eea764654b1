"""The judge's losses of distillation, from whole logits of student and teacher, by definition."""

from __future__ import annotations

import torch
from torch import Tensor

from meshlora_ground.objectives.distillation import Distill
from meshlora_judge.batches import UNTRAINED, MicroBatch


def distill(objective: Distill, logits: Tensor, batch: MicroBatch, base: Tensor | None, is_training: bool) -> Tensor:
    """One loss per trained token. base: the teacher's logits, of its own rows if it sees a context; None: recorded."""
    found = list[Tensor]()
    seen = batch if batch.other is None else batch.other
    for row in range(len(logits)):
        own = batch.labels[row] != UNTRAINED
        labels, of_student = batch.labels[row][own].tolist(), logits[row][own].float()
        if base is not None:
            of_teacher = base[row][seen.labels[row] != UNTRAINED].float()
        for place, label in enumerate(labels):
            student = torch.softmax(of_student[place] / objective.temperature, 0)
            if base is None:
                columns = {name: column[row][own][place] for name, column in batch.columns.items()}
                teacher, student = _recorded(objective, columns, student)
            else:
                teacher = torch.softmax(of_teacher[place] / objective.temperature, 0)
                if objective.top_k is not None:
                    chosen = torch.argsort(teacher, descending=True)[: objective.top_k]
                    teacher, student = (_of_few(objective, each[chosen]) for each in (teacher, student))
            loss = divergence(objective, teacher, student)
            if objective.cross_entropy:
                loss = loss - objective.cross_entropy * torch.log_softmax(of_student[place], 0)[label]
            found.append(loss)
    return torch.stack(found)


def divergence(objective: Distill, teacher: Tensor, student: Tensor) -> Tensor:
    """Between two distributions, `[]`. jsd: equation 1 of the paper of GKD."""
    if objective.divergence == "forward_kl":
        return _kl(teacher, student)
    if objective.divergence == "reverse_kl":
        return _kl(student, teacher)
    mixed = objective.beta * teacher + (1 - objective.beta) * student
    return objective.beta * _kl(teacher, mixed) + (1 - objective.beta) * _kl(student, mixed)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * torch.log(p / q)).sum()


def _recorded(objective: Distill, columns: dict[str, Tensor], student: Tensor) -> tuple[Tensor, Tensor]:
    """(teacher, student) on the tokens that the record of one token has."""
    tokens, known = list[int](), list[Tensor]()
    for rank in range(len(columns) // 2):
        log_p = columns[f"teacher_log_prob_{rank}"]
        if torch.isfinite(log_p) and len(known) != objective.top_k:
            tokens.append(int(columns[f"teacher_token_{rank}"]))
            known.append(torch.exp(log_p.to(student.dtype) / objective.temperature))
    return _of_few(objective, torch.stack(known)), _of_few(objective, student[tokens])


def _of_few(objective: Distill, known: Tensor) -> Tensor:
    """A distribution made of the probabilities of some tokens."""
    if objective.rest == "renormalize":
        return known / known.sum()
    return torch.cat([known, torch.clamp(1 - known.sum(), min=1e-7).unsqueeze(0)])
