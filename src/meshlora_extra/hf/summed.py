"""Whether a loss function of a user's own adds up over rows, as that of ranks with a share of them must.

Owns: the trial of a `compute_loss_func` in its first calls. Does not own: what else a trainer refuses
(`meshlora_extra.hf.arguments`).

Each dp rank calls the function with its own rows, and gradients are summed. So it must be a sum over rows, as one that
divides by `num_items_in_batch` is, the tokens of all: a row given twice then counts twice. A mean gives the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import Mesh
from meshlora_ground.errors import UnsupportedError


class SummedLoss:
    """The `compute_loss_func` of a trainer on several dp ranks, tried on one row until a rank has seen a loss."""

    def __init__(self, function: Callable[..., Tensor], mesh: Mesh) -> None:
        self.function, self._mesh, self._is_shown = function, mesh, False

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        """Raises UnsupportedError, on all ranks, before anything is trained: it does not add up over rows."""
        if not self._is_shown:
            self._try(outputs, labels, num_items_in_batch)
        return self.function(outputs, labels, num_items_in_batch=num_items_in_batch)

    def _try(self, outputs: Any, labels: Any, number: Any) -> None:
        """Call the function, without gradients, for the first row and for the first row twice. Collective."""
        device, found = self._mesh.device, []
        every, gpus = outputs, []
        if isinstance(outputs, Mapping):
            every = outputs.values()
        if device.type == "cuda":
            gpus.append(device)
        logits = next(value for value in every if isinstance(value, Tensor) and value.is_floating_point())
        with torch.no_grad(), torch.random.fork_rng(gpus):
            for rows in ([0], [0, 0]):
                given = [_rows(value, rows, len(logits)) for value in (outputs, labels)]
                found.append(self.function(*given, num_items_in_batch=number).detach())
        once, twice = map(float, found)
        # Of the coarsest type that it may be computed in. A mean misses by half.
        limit = max(torch.finfo(value.dtype).eps for value in (logits, found[0])) ** 0.5
        is_known = once == once and once != 0.0  # a row without labels tells nothing
        adds_up = abs(twice - 2 * once) <= limit * abs(once)
        # One rank that sees a mean refuses for all.
        told = torch.tensor([float(is_known and not adds_up), float(is_known)], device=device)
        is_wrong, is_shown = (all_reduce_sum(told, self._mesh.world) > 0).tolist()
        if is_wrong:
            raise UnsupportedError(
                f"a compute_loss_func that is a mean and dp={self._mesh.dp.size}",
                f"each rank has a share of the rows, and a row given twice must count twice: {once:g} became {twice:g}",
                "return a sum divided by num_items_in_batch, the trained tokens of all ranks; or use dp=1",
            )
        self._is_shown = is_shown


def _rows(value: Any, rows: list[int], number: int) -> Any:
    """Copies of `rows` of all tensors `[number, ...]` anywhere in `value`."""

    def is_of_rows(one: Any) -> bool:
        return isinstance(one, Tensor) and one.ndim > 0 and len(one) == number

    return recursively_apply(lambda tensor: tensor[rows], value, test_type=is_of_rows)
