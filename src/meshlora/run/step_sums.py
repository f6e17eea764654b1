"""The statistics of an optimizer step: summed on the device over micro-batches and ranks, and read once.

Owns: the only point of a step where the host waits for the device; until then it just enqueues work. Does not own: the
gradient norm and the token count (`train.gradsync`), handling of non-finite steps (`run.trainer`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshlora.comm.collectives import all_gather, all_reduce_sum
from meshlora.comm.groups import Mesh
from meshlora.run.mismatch import LARGEST, with_mismatch
from meshlora.train.batch import Batch
from meshlora.train.gradsync import check_total
from meshlora_ground.slow_paths import TAKEN, SlowPath
from meshlora_ground.transfer import to_device


@dataclass(frozen=True)
class StepResult:
    """The statistics of a step, the same on all ranks.

    means: other statistics of the objective, by name, averaged as the loss. tokens: number of trained tokens.
    is_finite: of loss and norm, on all ranks. is_to_stop: a rank was asked to stop. slow_paths: that a rank has taken.
    is_spike: the loss is above the limit that a rank has given.
    """

    loss: float
    means: dict[str, float]
    grad_norm: float
    tokens: int
    is_finite: bool
    is_to_stop: bool
    slow_paths: tuple[SlowPath, ...] = ()
    is_spike: bool = False


class StepSums:
    """Statistics of a step of K adapters, summed over this rank's micro-batches.

    names: of the adapters, if there are several. may_be_empty: a step may have no token that is trained, as all of its
    rollouts are masked: its loss is 0, as in TRL.
    """

    def __init__(self, mesh: Mesh, names: Sequence[str], *, may_be_empty: bool = False) -> None:
        self._mesh, self._names, self._may_be_empty = mesh, names, may_be_empty
        self._tokens, self.counts = [0] * len(names), [0] * len(names)
        self._sums: dict[str, list[Any]] = {}
        self._largest: list[Tensor] = []  # of each adapter, if the objective reports it

    def add(self, number: int, batch: Batch, count: int, loss: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Add the rows of adapter `number` in one micro-batch. count: their items, as counted by the objective."""
        self._tokens[number] += batch.num_trained_tokens
        self.counts[number] += count
        sums = dict(sums)
        if (largest := sums.pop(LARGEST, None)) is not None:
            self._largest = self._largest or [torch.zeros_like(largest, dtype=torch.float64) for _ in self._names]
            self._largest[number] = torch.maximum(self._largest[number], largest.double())
        for name, value in {"loss": loss, **sums}.items():
            of_each = self._sums.setdefault(name, [0.0] * len(self._names))
            before, own = of_each[number], value.double()
            of_each[number] = before + own if isinstance(before, Tensor) else own

    def read(
        self,
        totals: Tensor,
        norms: Tensor,
        *,
        is_asked: bool,
        taken: Collection[SlowPath] = (),
        limits: Sequence[float] | None = None,
    ) -> list[StepResult]:
        """The statistics of each adapter's step, over all ranks. Collective; waits for the device.

        totals: `[K]`, divisors of the sums. norms: `[K]`, float64, of the gradients. is_asked: to stop, this rank.
        taken: slow paths, by this rank. limits: of each adapter's loss, as this rank has them; None, on all: of none.

        Raises:
            MeshloraError: nothing was trained.
        """
        number, device = len(self._names), self._mesh.device
        # Filled: a copy from the host would wait. An adapter without rows on this rank has no tensor.
        tokens_here = [number * self._mesh.is_counted for number in self._tokens]
        own = [*tokens_here, *(value for of_each in self._sums.values() for value in of_each)]
        filled = [v if isinstance(v, Tensor) else torch.full((), v, dtype=torch.float64, device=device) for v in own]
        summed = all_reduce_sum(torch.stack(filled), self._mesh.losses).view(-1, number)
        if self._may_be_empty:
            totals = totals.clamp(min=1)
        tokens, means = summed[:1], summed[1:] / totals  # the loss comes first
        is_broken = (means[0] + norms) * 0 != 0  # 0 times infinity is NaN, as is 0 times NaN
        said = torch.tensor([is_asked, *(path in taken for path in TAKEN)], dtype=torch.float64, device="cpu")
        of_rank = to_device(said, device).unsqueeze(1).expand(-1, number)
        of_losses = is_broken.double().unsqueeze(0)
        if limits is not None:  # compared here: losses of tp ranks may differ in their last bits, and decide alike
            most = to_device(torch.tensor(limits, dtype=torch.float64, device="cpu"), device)
            is_spike = (means[0] > most) & (means[0] < math.inf)
            of_losses = torch.stack([is_broken, is_spike]).double()
        flags = all_reduce_sum(torch.cat([of_losses, of_rank]), self._mesh.world)
        if self._largest:
            every = all_gather(torch.stack(self._largest).unsqueeze(0), self._mesh.losses)
            means = torch.cat([means, every.amax(0, keepdim=True)])  # a largest value is no sum to divide
        read = torch.cat([flags, norms.unsqueeze(0), totals.unsqueeze(0), tokens, means]).T.tolist()
        results = []
        for name, (num_broken, *numbers) in zip(self._names, read, strict=True):
            num_spiked = 0 if limits is None else numbers.pop(0)
            num_asked = numbers.pop(0)
            num_slow, (norm, count, num_tokens, *of_loss) = numbers[: len(TAKEN)], numbers[len(TAKEN) :]
            if not self._may_be_empty:
                check_total(int(count), name)
            named = dict(zip([*self._sums, *([LARGEST] if self._largest else [])], of_loss, strict=True))
            loss = named.pop("loss")
            slow = tuple(path for path, num_ranks in zip(TAKEN, num_slow, strict=True) if num_ranks)
            means_of = with_mismatch(named)
            said_of = num_broken == 0, num_asked > 0, slow, num_spiked > 0
            results.append(StepResult(loss, means_of, norm, int(num_tokens), *said_of))
        return results
