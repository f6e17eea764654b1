"""The source of a non-finite loss or gradient: which sequences, and which module first.

Owns: rerunning the step by micro-batch, and the message. Does not own: what follows (`run.trainer`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.adapter.attach import active_factors, runtime
from meshlora.comm.collectives import all_gather
from meshlora.model.regions import tensors_in
from meshlora.train.batches import MicroBatch
from meshlora_ground.errors import numbered
from meshlora_ground.topology import SEQUENCES

_FINITE, _FORWARD, _LOSS, _GRADIENT = range(4)


@dataclass
class _First:
    """The first module of a forward with non-finite output: its number, and its place in the order of execution."""

    module: int = -1
    place: int = 0
    done: int = 0


def find_not_finite(
    model: Any,
    batches: Sequence[MicroBatch],
    loss_sum: Callable[[MicroBatch], Tensor],
    *,
    examples: Callable[[int, int], list[int]],
) -> str:
    """A message naming the non-finite sequences of the step and their first non-finite tensor. Collective.

    Every rank reruns forward and backward of each of its micro-batches; the findings are gathered. Clears gradients.

    Args:
        batches: this rank's micro-batches of the step. loss_sum: the summed loss of one.
        examples: (dp rank, number of its micro-batch) -> its examples, as indices of the training data.
    """
    mesh = runtime(model).mesh
    if mesh.topology.interleave > 1:
        return "its source is not looked for where ranks have several stages: use interleave=1 to find it"
    factors = active_factors(model)
    found = torch.zeros(len(batches), 3, dtype=torch.int64, device=mesh.device)  # kind, which, place in the forward
    for row, batch in zip(found, batches, strict=True):
        model.zero_grad(set_to_none=True)
        with _watching(model) as first:
            loss = loss_sum(batch)
        loss.backward()
        broken = [n for n, factor in enumerate(factors) if not _is_finite(factor.parameter.grad)]
        if first.module >= 0:
            row.copy_(row.new_tensor([_FORWARD, first.module, first.place]))
        elif not torch.isfinite(loss):
            row[0] = _LOSS
        elif broken:
            row.copy_(row.new_tensor([_GRADIENT, broken[-1], 0]))  # the backward reaches the last one first
    model.zero_grad(set_to_none=True)
    everyone = all_gather(found.unsqueeze(0), mesh.world).tolist()  # [world, micro-batches, 3]
    bad = [(number, rank) for rank, rows in enumerate(everyone) for number, row in enumerate(rows) if row[0]]
    if not bad:
        return "no micro-batch by itself shows it"
    dp_ranks = {rank: place for group in mesh.topology.groups_over(SEQUENCES) for place, rank in enumerate(group)}
    sequences = sorted({example for number, rank in bad for example in examples(dp_ranks[rank], number)})
    if mesh.pp.size > 1:  # ranks of other stages have other modules
        where = [(everyone[rank][number][0], mesh.topology.stage_of(rank)) for number, rank in bad]
        kind, stage = min(where, key=lambda of: (of[0], -of[1] if of[0] == _GRADIENT else of[1]))  # as values pass on
        return f"in {numbered('sequence', sequences)} of the training data (from 0), first in layers of stage {stage}"
    # A sum spreads one rank's NaN to all ranks; it originates in the earliest module.
    kind, which, _ = min((everyone[rank][number] for number, rank in bad), key=lambda row: (row[0], row[2]))
    names = [name for name, _ in model.named_modules()]
    what = "the loss itself, of finite outputs"
    if kind == _FORWARD:
        what = f"the output of {names[which]}"
    elif kind == _GRADIENT:
        what = f"the gradient of {factors[which].name}, of a finite loss"
    return f"in {numbered('sequence', sequences)} of the training data (from 0), first {what}"


@contextlib.contextmanager
def _watching(model: nn.Module) -> Iterator[_First]:
    first = _First()

    def hook(number: int) -> Callable[[nn.Module, Any, Any], None]:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            first.done += 1
            # Logits of a split head are a subclass: a stand-in for the loss only.
            tensors = (tensor for tensor in tensors_in(output) if type(tensor) is Tensor)
            if first.module < 0 and not all(map(_is_finite, tensors)):
                first.module, first.place = number, first.done

        return look

    hooks = [module.register_forward_hook(hook(number)) for number, (_, module) in enumerate(model.named_modules())]
    try:
        yield first
    finally:
        for handle in hooks:
            handle.remove()


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
