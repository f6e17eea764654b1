"""Finishing gradients: from partial sums on every rank to the gradient one process would have.

Owns: the sum over each factor's gradient axes (and mean axes), one flat bucket per distinct set of axes; division by
the global number of trained tokens; the one true global norm. Does not own: which axes those are (`plan.grads`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.manage import Factor, active_factors, runtime
from meshlora.errors import MeshloraError
from meshlora.parallel.collectives import all_reduce_sum
from meshlora.parallel.groups import Mesh

# Marks a gradient tensor that is summed and divided: a second time would be silently wrong.
_FINISHED = "_meshlora_finished"


@torch.no_grad()
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
    # int64: a float cannot count past 2^24 (fp32) or 256 (bf16) exactly.
    total = int(all_reduce_sum(torch.tensor([num_tokens], device=mesh.device), mesh.dp).item())
    if total == 0:
        raise MeshloraError("no rank has a trained token in this step, so its mean loss is not defined")
    for axes, mean_axes in sorted({(f.rule.grad_axes, f.rule.mean_axes) for f in factors}, key=_in_order):
        grads = [_grad(f) for f in factors if (f.rule.grad_axes, f.rule.mean_axes) == (axes, mean_axes)]
        _sum_bucket(grads, axes | mean_axes, mesh, scale=1 / (total * mesh.over(mean_axes).size))
    return total


@torch.no_grad()
def clip_gradients(model: Any, max_norm: float | None) -> float:
    """Scale all gradients so that their global 2-norm is at most `max_norm`; None or 0 only measures. Collective.

    Every logical element counts once: split factors add up over tp, whole ones count on one rank.

    Returns:
        The norm before clipping.
    """
    mesh = runtime(model).mesh
    factors = active_factors(model)
    whole, split = (
        _sum_of_squares([f for f in factors if (f.rule.split_dim is not None) == is_split], mesh)
        for is_split in (False, True)
    )
    # Over all ranks, though dp ranks hold the same: one sum gives every rank the same bits, several might not.
    norm = float((whole + all_reduce_sum(split, mesh.world) / mesh.dp.size).sqrt())
    if max_norm and norm > max_norm:
        for factor in factors:
            _grad(factor).mul_(max_norm / (norm + 1e-6))  # the same epsilon as torch.nn.utils.clip_grad_norm_
    return norm


def _grad(factor: Factor) -> Tensor:
    assert factor.parameter.grad is not None, factor.name
    return factor.parameter.grad


def _in_order(axes: tuple[frozenset[str], frozenset[str]]) -> tuple[list[str], ...]:
    """The same order on every rank."""
    return tuple(map(sorted, axes))


def _sum_bucket(grads: list[Tensor], axes: frozenset[str], mesh: Mesh, *, scale: float) -> None:
    """Sum `grads` over `axes` as one flat message, scale, and put the results back."""
    flat = all_reduce_sum(torch.cat([g.reshape(-1) for g in grads]), mesh.over(axes)).mul_(scale)
    for grad, result in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(result.view_as(grad))
        setattr(grad, _FINISHED, True)


def _sum_of_squares(factors: list[Factor], mesh: Mesh) -> Tensor:
    return sum(
        (_grad(f).double().square().sum() for f in factors),
        start=torch.zeros((), dtype=torch.float64, device=mesh.device),
    ).reshape(1)
