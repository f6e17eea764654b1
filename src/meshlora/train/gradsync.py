"""Finishing gradients: from partial sums on every rank to the gradient one process would have.

Owns: the sum over each factor's gradient axes (and mean axes), one flat bucket per distinct set of axes; division by
the global number of trained tokens; the one true global norm. Does not own: which axes those are (`plan.grads`).

Each comes twice: with a number for loops of a user's own, and `_on_device`, where nothing waits for the device: the
host goes on to give it work, and reads all numbers of a step at once (`train.trainer`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.manage import Factor, active_factors, runtime
from meshlora.compat import copy_each, multiply_each, norm_of_each
from meshlora.errors import MeshloraError
from meshlora.parallel.collectives import all_reduce_in_place, all_reduce_sum
from meshlora.parallel.groups import Mesh
from meshlora.plan.grads import Segment, segment_of

# Marks a gradient tensor that is summed and divided: a second time would be silently wrong.
_FINISHED = "_meshlora_finished"


def finish_gradients(model: Any, *, num_tokens: int) -> int:
    """Turn gradients of a summed loss into those of the mean over all trained tokens of all ranks. Collective.

    Call it once per optimizer step, after the last backward of the accumulation loop and before clipping.

    Args:
        num_tokens: trained tokens that this rank's losses were summed over. tp ranks see the same tokens and must
            give the same number.

    Returns:
        The global number of trained tokens, counted once.

    Raises:
        MeshloraError: a trainable factor has no gradient, or nobody trained any token.
    """
    total = int(finish_gradients_on_device(model, num_tokens=num_tokens).item())
    check_total(total)
    return total


def check_total(total: int) -> None:
    """Raises:
    MeshloraError: no token was trained.
    """
    if total == 0:
        raise MeshloraError("no rank has a trained token in this step, so its mean loss is not defined")


@torch.no_grad()
def finish_gradients_on_device(model: Any, *, num_tokens: int) -> Tensor:
    """`finish_gradients`; the number is `[1]`, int64, and not looked at (`check_total`)."""
    mesh = runtime(model).mesh
    factors = active_factors(model)
    for factor in factors:
        if factor.parameter.grad is None:
            raise MeshloraError(f"{factor.name} has no gradient: was backward called, and did the forward use it?")
        if hasattr(factor.parameter.grad, _FINISHED):
            raise MeshloraError(
                f"the gradient of {factor.name} is finished already: call finish_gradients once per optimizer step, "
                "after the last backward, and zero_grad(set_to_none=True) after the step"
            )
    # int64: a float cannot count past 2^24 (fp32) or 256 (bf16) exactly. Filled: a copy from the host would wait.
    total = all_reduce_sum(torch.full((1,), num_tokens, dtype=torch.int64, device=mesh.device), mesh.dp)
    buckets: dict[tuple[frozenset[str], frozenset[str]], list[Tensor]] = {}
    for factor in factors:
        for segment in _segments(factor, mesh):
            part = segment_of(_grad(factor), segment)
            buckets.setdefault((segment.grad_axes, segment.mean_axes), []).append(part)
    for (axes, mean_axes), grads in sorted(buckets.items(), key=lambda item: _in_order(item[0])):
        # Of no token at all gradients stay numbers: whoever looks at the total says so.
        scale = 1 / (total[0].clamp(min=1).double() * mesh.over(mean_axes).size)
        _sum_bucket(grads, axes | mean_axes, mesh, scale=scale)
    for factor in factors:
        setattr(_grad(factor), _FINISHED, True)
    return total


def clip_gradients(model: Any, max_norm: float | None) -> float:
    """Scale all gradients so that their global 2-norm is at most `max_norm`; None or 0 only measures. Collective.

    Every logical element counts once, whoever and how many hold it.

    Returns:
        The norm before clipping.
    """
    return float(clip_gradients_on_device(model, max_norm).item())


@torch.no_grad()
def clip_gradients_on_device(model: Any, max_norm: float | None) -> Tensor:
    """`clip_gradients`; the norm is `[1]`, float64, and not looked at. Not finite, it leaves no gradient to use."""
    mesh = runtime(model).mesh
    factors = active_factors(model)
    # Over all ranks, each with its share of what several hold: one sum gives every rank the same bits.
    norm = all_reduce_sum(_sum_of_squares(factors, mesh), mesh.world).sqrt()
    if max_norm:
        # The same epsilon as torch.nn.utils.clip_grad_norm_.
        _multiply([_grad(factor) for factor in factors], (max_norm / (norm[0] + 1e-6)).clamp(max=1.0))
    return norm


def _grad(factor: Factor) -> Tensor:
    assert factor.parameter.grad is not None, factor.name
    return factor.parameter.grad


def _in_order(axes: tuple[frozenset[str], frozenset[str]]) -> tuple[list[str], ...]:
    """The same order on every rank."""
    return tuple(map(sorted, axes))


def _sum_bucket(grads: list[Tensor], axes: frozenset[str], mesh: Mesh, *, scale: Tensor) -> None:
    """Sum `grads` over `axes` as one flat message, scale, and put the results back."""
    if mesh.over(axes).size == 1:
        _multiply(grads, scale)
        return
    # The bucket is fresh memory that nobody else holds: no copy of it is made for the sum.
    flat = all_reduce_in_place(torch.cat([g.reshape(-1) for g in grads]), mesh.over(axes))
    _multiply([flat], scale)
    copy_each(grads, [r.view_as(g) for g, r in zip(grads, flat.split([g.numel() for g in grads]), strict=True)])


def _multiply(tensors: list[Tensor], scale: Tensor) -> None:
    """In place, with a number `[]` that is on the device; all are float32, or all float64."""
    multiply_each(tensors, scale.to(tensors[0].dtype))


def _sum_of_squares(factors: list[Factor], mesh: Mesh) -> Tensor:
    """`[1]`, float64: the squares of all elements on this rank, each over the number of ranks that hold it."""
    by_holders: dict[int, list[Tensor]] = {}
    for factor in factors:
        for segment in _segments(factor, mesh):
            holders = segment.copies * mesh.topology.size_over(segment.replicas)
            by_holders.setdefault(holders, []).append(segment_of(_grad(factor), segment))
    total = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    for holders, parts in sorted(by_holders.items()):
        total += torch.stack(norm_of_each(parts, dtype=torch.float64)).square().sum() / holders
    return total


def _segments(factor: Factor, mesh: Mesh) -> list[Segment]:
    return factor.rule.segments(rank=mesh.tp.rank, size=mesh.tp.size)
