"""The numbers of an optimizer step: added up on the device, over micro-batches and ranks, and read there once.

Owns: the one place in a step where the host waits for the device. Until then it only gives it work, so that a GPU has
some while the host prepares more. Does not own: the gradient's norm and the count (`train.gradsync`), what follows from
a step that is not finite (`train.trainer`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import Mesh
from meshlora.data import Batch
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
    """What a step of K adapters reports, as sums over this rank's micro-batches.

    names: of the adapters, where there are several.
    """

    def __init__(self, mesh: Mesh, names: Sequence[str] = ("",)) -> None:
        self._mesh, self._names = mesh, names
        self._tokens, self.counts = [0] * len(names), [0] * len(names)
        self._sums: dict[str, list[Any]] = {}

    def add(self, number: int, batch: Batch, count: int, loss: Tensor, sums: Mapping[str, Tensor]) -> None:
        """What the rows of adapter `number` in one micro-batch add. count: what its objective counts of them."""
        self._tokens[number] += batch.num_trained_tokens
        self.counts[number] += count
        for name, value in {"loss": loss, **sums}.items():
            of_each = self._sums.setdefault(name, [0.0] * len(self._names))
            of_each[number] = of_each[number] + value.double()

    def read(self, totals: Tensor, norms: Tensor, *, is_asked: bool) -> list[StepResult]:
        """All numbers of the step of each adapter, over all ranks. Collective; waits for the device.

        totals: `[K]`, what sums are divided by. norms: `[K]`, float64, of the gradients. is_asked: this rank, to stop.

        Raises:
            MeshloraError: nothing was trained.
        """
        number, device = len(self._names), self._mesh.device
        # Filled: a copy from the host would wait. Of which this rank has had no row it has no tensor.
        own = [*self._tokens, *(value for of_each in self._sums.values() for value in of_each)]
        filled = [v if isinstance(v, Tensor) else torch.full((), v, dtype=torch.float64, device=device) for v in own]
        summed = all_reduce_sum(torch.stack(filled), self._mesh.data)
        means = summed[number:].view(-1, number) / totals
        others = torch.cat([totals, summed[:number], means[1:].flatten()])
        read = read_step(means[0], norms, others, mesh=self._mesh, is_asked=is_asked)
        rows = [read.numbers[start : start + number] for start in range(0, len(read.numbers), number)]
        results = []
        for place, (name, count, tokens, *rest) in enumerate(zip(self._names, *rows, strict=True)):
            check_total(int(count), name)
            named = dict(zip([key for key in self._sums if key != "loss"], rest, strict=True))
            is_finite = read.are_finite[place]
            results.append(
                StepResult(read.losses[place], named, read.norms[place], int(tokens), is_finite, read.is_to_stop)
            )
        return results
