"""How far a student is from its teacher at each trained token, over a vocabulary split over tp.

Owns: divergences over the whole vocabulary, or over the teacher's likeliest tokens, with their gradients, chunk by
chunk: no rank has whole logits of either. Does not own: the chunks (`layers.head_loss`), where what a teacher says
comes from (`run.distillation.teachers`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshlora.comm.collectives import all_gather
from meshlora.comm.groups import Axis
from meshlora.layers.head_loss import ChunkLoss, Targets
from meshlora_ground.objectives.distillation import Distill

# The probability that is left for the tokens outside the likeliest ones is at least this (as in TRL): its log enters.
_LEAST_REST = 1e-7


class Hidden(NamedTuple):
    """A teacher that runs: what its head is given, `[N, H]` of N trained tokens; its head, as of the student's."""

    rows: Tensor
    head: Callable[[Tensor], Tensor]

    def of(self, chunk: slice) -> Hidden:
        """Of some tokens."""
        return self._replace(rows=self.rows[chunk])


class Likeliest(NamedTuple):
    """The likeliest tokens of a teacher, and their log-probabilities, `[N, k]`; -inf where there are fewer."""

    ids: Tensor
    log_p: Tensor

    def of(self, chunk: slice) -> Likeliest:
        """At some tokens."""
        return Likeliest(self.ids[chunk], self.log_p[chunk])


class _Taught(NamedTuple):
    """The labels of trained tokens, and what the teacher says there."""

    labels: Targets
    teacher: Hidden | Likeliest

    def of(self, chunk: slice) -> _Taught:
        """Those of some tokens."""
        return _Taught(self.labels.of(chunk), self.teacher.of(chunk))


@dataclass(frozen=True)
class _OverVocabulary(ChunkLoss):
    """Distributions over the vocabulary of all ranks."""

    def _normalized(self, logits: Tensor, labels: Targets, space: Tensor) -> Tensor:
        """log-probabilities `[t, V/tp]`, -inf in the padding; over the vocabulary of all ranks. space: overwritten."""
        sums = space.new_zeros(4, len(logits))
        ChunkLoss.__call__(self, logits, labels, space, sums)
        found = logits.to(self.dtype) - (sums[0] + sums[1].log()).unsqueeze(1)
        found[:, self.num_real(logits.shape[1]) :] = -torch.inf
        return found

    def likeliest(self, log_p: Tensor, number: int) -> Likeliest:
        """The `number` likeliest tokens of the whole vocabulary, or all. log_p: `[t, V/tp]` of this rank."""
        size = log_p.shape[1]
        values, ids = log_p.topk(min(number, size), 1)
        own = torch.stack([values, (ids + self.axis.rank * size).to(values.dtype)])  # exact: float32 counts to 2^24
        of_ranks = all_gather(own, self.axis).view(self.axis.size, *own.shape).movedim(0, 2).flatten(2)  # [2, t, tp*k]
        values, place = of_ranks[0].topk(min(number, self.vocab), 1)
        return Likeliest(of_ranks[1].gather(1, place).long(), values)


@dataclass(frozen=True)
class Recording(_OverVocabulary):
    """No loss: keeps the `number` likeliest tokens of each chunk in `said`."""

    number: int = 1
    said: list[Likeliest] = field(default_factory=list)

    def __call__(self, logits: Tensor, targets: Any, gradient: Tensor, sums: Tensor) -> None:
        """logits `[t, V/tp]`, at temperature 1."""
        self.said.append(self.likeliest(self._normalized(logits, targets, gradient), self.number))


@dataclass(frozen=True)
class DivergenceLoss(_OverVocabulary):
    """The loss of one chunk: divergence + cross_entropy * -log p(label).

    Attributes:
        objective: which divergence. teacher: of all trained tokens. found: gets (divergence, -log p) `[N]` of them.
        tells: whether -log p is wanted where the loss has no part in it.
    """

    objective: Distill
    teacher: Hidden | Likeliest
    tells: bool = False
    found: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, axis: Axis, vocab: int, dtype: torch.dtype, *given: Any) -> DivergenceLoss:
        """given: objective, teacher, tells."""
        return cls(axis, vocab, 0.0, dtype, *given)

    def targets(self, labels: Tensor, num_local: int) -> Any:
        """As of the cross-entropy, with the teacher."""
        return _Taught(super().targets(labels, num_local), self.teacher)

    def __call__(self, logits: Tensor, targets: Any, gradient: Tensor, sums: Tensor) -> None:
        """logits `[t, V/tp]` -> `gradient` `[t, V/tp]` gets d sum(loss) / dx, `sums` `[4, t]` divergence and -log p.

        With q of the student, p of the teacher, T the temperature, and g[v] = q[v] dD/dq[v]:
            dD/dx[v] = (g[v] - q[v] sum_u g[u]) / T
        """
        labels, teacher = targets
        temperature = self.objective.temperature
        log_q = self._normalized(logits / temperature, labels, gradient)
        if isinstance(teacher, Hidden):
            log_p = self.of_teacher(teacher, labels, gradient)
            if self.objective.top_k is not None:
                teacher = self.likeliest(log_p, self.objective.top_k)
        if isinstance(teacher, Hidden):
            sums[0] = self._of_all(log_p, log_q, gradient)
        else:
            sums[0] = self._of_likeliest(teacher, log_q, gradient)
        gradient.div_(temperature)
        if self.tells or self.objective.cross_entropy:
            of_labels, more = sums.new_zeros(sums.shape), torch.empty_like(gradient)
            ChunkLoss.__call__(self, logits, labels, more, of_labels)
            sums[1] = ChunkLoss.losses(self, of_labels)
            gradient.add_(more, alpha=self.objective.cross_entropy)

    def losses(self, sums: Tensor) -> Tensor:
        """`[N]` from the sums `[4, N]`."""
        self.found[:] = sums[:2]
        return sums[0] + self.objective.cross_entropy * sums[1]

    @torch.no_grad()
    def of_teacher(self, teacher: Hidden, labels: Targets, space: Tensor) -> Tensor:
        """log p `[t, V/tp]`, tempered."""
        return self._normalized(teacher.head(teacher.rows) / self.objective.temperature, labels, space)

    def _summed(self, values: Tensor) -> Tensor:
        """The sum of `values` over the ranks of the vocabulary."""
        return all_gather(values, self.axis).view(self.axis.size, *values.shape).sum(0)

    def _of_all(self, log_p: Tensor, log_q: Tensor, gradient: Tensor) -> Tensor:
        """The divergence at each token, `[t]`; `gradient` gets that by the logits over T."""
        each, slope = terms(self.objective, log_p, log_q)
        divergence, total = self._summed(torch.stack([each.sum(1), slope.sum(1)]))
        torch.sub(slope, log_q.exp() * total.unsqueeze(1), out=gradient)
        return divergence

    def _of_likeliest(self, teacher: Likeliest, log_q: Tensor, gradient: Tensor) -> Tensor:
        """As `_of_all`, of the teacher's likeliest tokens and, as one more, the rest."""
        place = teacher.ids - self.axis.rank * log_q.shape[1]
        is_here = (place >= 0) & (place < log_q.shape[1])
        place = place.clamp(0, log_q.shape[1] - 1)
        log_p = teacher.log_p.to(self.dtype)
        own = self._summed(torch.where(is_here, log_q.gather(1, place), 0.0))
        own = torch.where(log_p.isinf(), log_p, own)  # not a token that is recorded
        has_rest = self.objective.rest == "bucket"
        log_p, log_own = (with_rest(each) if has_rest else each.log_softmax(1) for each in (log_p, own))
        each, slope = terms(self.objective, log_p, log_own)
        found = slope - log_own.exp() * slope.sum(1, keepdim=True)  # [t, k], or k + 1
        if not has_rest:
            gradient.zero_().scatter_add_(1, place, found.where(is_here, 0.0))
            return each.sum(1)
        # A token of the rest has its share of what the rest has.
        torch.exp(log_q, out=gradient).mul_(found[:, -1:] / log_own[:, -1:].exp())
        before = gradient.gather(1, place)
        is_token = is_here & ~teacher.log_p.isinf()
        gradient.scatter_add_(1, place, torch.where(is_token, found[:, :-1] - before, 0.0))
        return each.sum(1)


def terms(objective: Distill, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """(what each token adds to the divergence D of teacher p and student q; q dD/dq, up to a multiple of q).

    forward_kl: KL(p || q). reverse_kl: KL(q || p). jsd: b KL(p || m) + (1 - b) KL(q || m), m = b p + (1 - b) q (GKD,
    Agarwal et al., 2024, equation 1). A probability of 0 adds nothing.
    """
    p, q = log_p.exp(), log_q.exp()
    if objective.divergence == "forward_kl":
        return _times(p, log_p - log_q), -p
    if objective.divergence == "reverse_kl":
        each = _times(q, log_q - log_p)
        return each, each
    beta = log_p.new_tensor(objective.beta)
    log_m = torch.logaddexp(log_p + beta.log(), log_q + torch.log1p(-beta))
    of_student = (1 - beta) * _times(q, log_q - log_m)
    return beta * _times(p, log_p - log_m) + of_student, of_student


def num_gathers(objective: Distill) -> int:
    """Of a chunk over the vocabulary, beside the one of a cross-entropy."""
    has_few = objective.top_k is not None and not objective.is_recorded  # which are looked for
    return 1 + (not objective.is_recorded) + has_few + (objective.cross_entropy > 0)


def with_rest(log_p: Tensor) -> Tensor:
    """`[t, k]` -> `[t, k+1]`: and the logarithm of what the others have together."""
    known = log_p.logsumexp(1, keepdim=True).clamp(max=-_LEAST_REST)
    return torch.cat([log_p, torch.log(-torch.expm1(known))], 1)


def _times(p: Tensor, values: Tensor) -> Tensor:
    return torch.where(p > 0, p * values, 0.0)
