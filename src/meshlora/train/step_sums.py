"""The numbers of an optimizer step: added up on the device, over micro-batches and ranks, and read there once.

Owns: the one place in a step where the host waits for the device. Until then it only gives it work, so that a GPU has
some while the host prepares more. Does not own: the gradient's norm and the count (`train.gradsync`), what follows from
a step that is not finite (`train.trainer`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshlora.data import Batch
from meshlora.parallel.collectives import all_reduce_sum
from meshlora.parallel.groups import Mesh
from meshlora.train.gradsync import check_total


@dataclass(frozen=True)
class Read:
    """What the step of each of K adapters came to, the same on all ranks.

    losses, norms: `[K]`. are_finite: `[K]`, both are, on all ranks. is_to_stop: a rank was asked to stop.
    numbers: what was read besides.
    """

    losses: list[float]
    norms: list[float]
    are_finite: list[bool]
    is_to_stop: bool
    numbers: list[float]


def read_step(losses: Tensor, norms: Tensor, numbers: Tensor, *, mesh: Mesh, is_asked: bool) -> Read:
    """All numbers of a step. Collective; waits for the device.

    losses, norms: `[K]`, float64, the mean losses and the norms of the gradients, over all ranks.
    numbers: `[N]`, float64, what else is to be read. is_asked: this rank, to stop.
    """
    is_broken = ~(torch.isfinite(losses) & torch.isfinite(norms))
    asked = torch.full((1,), float(is_asked), dtype=torch.float64, device=mesh.device)  # a copy from here would wait
    flags = all_reduce_sum(torch.cat([is_broken.double(), asked]), mesh.world)
    parts = [losses, norms, flags, numbers]
    read: list[float] = torch.cat(parts).tolist()
    by_part = iter(read)
    values = [list(itertools.islice(by_part, len(part))) for part in parts]
    *num_broken, num_asked = values[2]
    return Read(values[0], values[1], [number == 0 for number in num_broken], num_asked > 0, values[3])


@dataclass(frozen=True)
class StepResult:
    """What a step came to, the same on all ranks.

    means: name -> mean over what the objective counts, besides the loss. tokens: trained ones.
    is_finite: loss and norm are, on all ranks. is_to_stop: a rank was asked to stop.
    """

    loss: float
    means: dict[str, float]
    grad_norm: float
    tokens: int
    is_finite: bool
    is_to_stop: bool


class StepSums:
    """What a step reports, as sums over this rank's micro-batches."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._tokens = mesh, 0
        self._sums: dict[str, Tensor] = {}

    def add(self, batch: Batch, loss: Tensor, sums: Mapping[str, Tensor]) -> None:
        """What one micro-batch adds."""
        self._tokens += batch.num_trained_tokens
        for name, value in {"loss": loss, **sums}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.double()

    def read(self, total: Tensor, norm: Tensor, *, is_asked: bool) -> StepResult:
        """All numbers of the step, over all ranks. Collective; waits for the device.

        total: `[1]`, what sums are divided by. norm: `[1]`, float64, of the gradient. is_asked: this rank, to stop.

        Raises:
            MeshloraError: nothing was trained.
        """
        tokens = torch.full((), self._tokens, dtype=torch.float64, device=self._mesh.device)
        summed = all_reduce_sum(torch.stack([tokens, *self._sums.values()]), self._mesh.dp)
        tokens, means = summed[:1], summed[1:] / total
        read = read_step(means[:1], norm, torch.cat([total, tokens, means[1:]]), mesh=self._mesh, is_asked=is_asked)
        count, num_tokens, *rest = read.numbers
        check_total(int(count))
        named = dict(zip([name for name in self._sums if name != "loss"], rest, strict=True))
        return StepResult(read.losses[0], named, read.norms[0], int(num_tokens), read.are_finite[0], read.is_to_stop)
