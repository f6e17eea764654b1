"""Finishing gradients: from partial sums on every rank to the gradient one process would have.

Owns: the sum over each factor's gradient axes (and mean axes), one flat bucket per distinct set of axes; division by
the global number of trained tokens; the global norm; for one adapter or several, in shared buckets. Does not own: the
choice of axes (`plan.grads`).

Each function comes twice: returning a number, for custom loops with one adapter, and `_on_device` for K adapters, where
the host never waits for the device: `run.step_sums` reads all numbers of a step at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.attach import Factor, active_factors, runtime
from meshlora.adapter.updates import is_finished, mark_finished
from meshlora.comm.collectives import all_reduce_in_place, all_reduce_sum
from meshlora.comm.groups import Mesh
from meshlora.plan.grads import GradPart, part_of
from meshlora_ground.compat.torch_tensors import copy_each, multiply_each, norm_of_each
from meshlora_ground.errors import MeshloraError, UserError

Adapters = Sequence[Sequence[Factor]]  # the local factors of each


def finish_gradients(model: Any, *, num_tokens: int) -> int:
    """Turn gradients of a summed loss into those of the mean over all trained tokens of all ranks. Collective.

    Call it once per optimizer step, after the last backward of the accumulation loop and before clipping.

    Args:
        num_tokens: number of trained tokens in this rank's rows. tp and cp ranks are given the same rows, and must pass
            the same number.

    Returns:
        The global number of trained tokens, counted once.

    Raises:
        MeshloraError: a trainable factor has no gradient, or no rank has a trained token. UserError: a loss that was
            divided already, as those of Hugging Face's models are, has given gradients.
    """
    mesh, loop = runtime(model).mesh, runtime(model).loop
    if loop.is_divided:
        loop.is_divided = False
        raise UserError(
            "finish_gradients after the backward of a mean, the loss of model(..., labels=...)",
            "it divides a sum over tokens by their number; means of micro-batches and ranks cannot be added up",
            "use `with meshlora.step(model, optimizer) as step: step.backward(loss)`, which takes this loss, or give "
            "the model num_items_in_batch=1, which makes it a sum",
        )
    counted = num_tokens if mesh.cp.rank == 0 else 0  # cp ranks give that of the whole rows
    total = int(finish_gradients_on_device(mesh, [active_factors(model)], [counted]).item())
    check_total(total)
    return total


def check_total(total: int, name: str = "") -> None:
    """Raises:
    MeshloraError: no token was trained. name: of the adapter, if there are several.
    """
    if total == 0:
        which = f"adapter {name}: " if name else ""
        raise MeshloraError(f"{which}no rank has a trained token in this step, so its mean loss is not defined")


@torch.no_grad()
def finish_gradients_on_device(mesh: Mesh, adapters: Adapters, num_tokens: Sequence[int]) -> Tensor:
    """`finish_gradients` of K adapters with `num_tokens` `[K]`, whose sum over dp and cp is their number: one
    all-reduce for each set of axes.

    Returns the global numbers `[K]`, int64, unchecked (see `check_total`).
    """
    for factor in itertools.chain(*adapters):
        if factor.parameter.grad is None:
            raise MeshloraError(f"{factor.name} has no gradient: was backward called, and did the forward use it?")
        if is_finished(factor.parameter.grad):
            raise MeshloraError(
                f"the gradient of {factor.name} is finished already: call finish_gradients once per optimizer step, "
                "after the last backward, and zero_grad(set_to_none=True) after the step"
            )
    # int64: a float cannot count past 2^24 (fp32) or 256 (bf16) exactly. Filled: a copy from the host would wait.
    counts = [torch.full((1,), number, dtype=torch.int64, device=mesh.device) for number in num_tokens]
    totals = all_reduce_sum(_joined(counts), mesh.data)
    buckets: dict[tuple[frozenset[str], frozenset[str]], list[list[Tensor]]] = {}
    for number, factors in enumerate(adapters):
        for factor in factors:
            for part in _parts(factor, mesh):
                of_each = buckets.setdefault((part.grad_axes, part.mean_axes), [[] for _ in adapters])
                of_each[number].append(part_of(_grad(factor), part))
    # Keep gradients finite if there is no token: `check_total` raises later.
    shares = 1 / totals.clamp(min=1).double()
    scales: dict[tuple[int, torch.dtype], Tensor] = {}  # mostly one for all buckets
    # In the same order on every rank.
    for (axes, mean_axes), grads in sorted(buckets.items(), key=lambda item: [*map(sorted, item[0])]):
        size, dtype = mesh.over(mean_axes).size, next(itertools.chain(*grads)).dtype
        if (size, dtype) not in scales:
            scales[size, dtype] = (shares / size if size > 1 else shares).to(dtype)
        _sum_bucket(grads, axes | mean_axes, mesh, scales=scales[size, dtype])
    # Summing and dividing a gradient again would be silently wrong.
    for factor in itertools.chain(*adapters):
        mark_finished(_grad(factor))
    return totals


def clip_gradients(model: Any, max_norm: float | None) -> float:
    """Scale all gradients so that their global 2-norm is at most `max_norm`; None or 0 only measures. Collective.

    Every logical element counts once, however many ranks hold it.

    Returns:
        The norm before clipping.
    """
    return float(clip_gradients_on_device(runtime(model).mesh, [active_factors(model)], [max_norm]).item())


@torch.no_grad()
def clip_gradients_on_device(mesh: Mesh, adapters: Adapters, max_norms: Sequence[float | None]) -> Tensor:
    """`clip_gradients` of K adapters with `max_norms` `[K]`. Returns the norms before clipping, `[K]`, float64.

    They are not checked: after one that is not finite, that adapter's gradient is unusable.
    """
    # One sum over all ranks, replicas counted in shares, gives every rank the same bits.
    squares = _joined([_sum_of_squares(factors, mesh) for factors in adapters])
    norms = all_reduce_sum(squares, mesh.world).sqrt()
    for factors, norm, max_norm in zip(adapters, norms, max_norms, strict=True):
        # 0 and None only measure.
        if max_norm:
            # The same epsilon as torch.nn.utils.clip_grad_norm_.
            _multiply(list(map(_grad, factors)), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norms


def fill_missing(factors: Sequence[Factor]) -> None:
    """Zero gradients for an adapter none of whose tokens came to this rank."""
    for factor in factors:
        if factor.parameter.grad is None:
            factor.parameter.grad = torch.zeros_like(factor.parameter)


def _grad(factor: Factor) -> Tensor:
    assert factor.parameter.grad is not None, factor.name
    return factor.parameter.grad


def _sum_bucket(grads: list[list[Tensor]], axes: frozenset[str], mesh: Mesh, *, scales: Tensor) -> None:
    """Sum the gradients of K adapters over `axes` as one flat message, scale by `[K]`, and put the results back.

    scales: in the dtype of the gradients.
    """
    if mesh.over(axes).size == 1:
        for own, scale in zip(grads, scales, strict=True):
            _multiply(own, scale)
        return
    # The bucket is fresh memory, so it is reduced in place.
    every = [*itertools.chain(*grads)]
    flat = all_reduce_in_place(torch.cat([grad.reshape(-1) for grad in every]), mesh.over(axes))
    of_adapters = [sum(grad.numel() for grad in own) for own in grads]
    for own, scale in zip(flat.split(of_adapters), scales, strict=True):
        _multiply([own], scale)
    summed = flat.split([grad.numel() for grad in every])
    copy_each(every, [own.view_as(grad) for own, grad in zip(summed, every, strict=True)])


def _multiply(tensors: list[Tensor], scale: Tensor) -> None:
    """In place, by a scale `[]` on the device. All tensors are float32, or all float64."""
    if tensors:
        multiply_each(tensors, scale.to(tensors[0].dtype))


def _sum_of_squares(factors: Sequence[Factor], mesh: Mesh) -> Tensor:
    """`[1]`, float64: sum of squares of this rank's elements, each divided by the number of its holders."""
    by_holders: dict[int, list[Tensor]] = {}
    for factor in factors:
        for part in _parts(factor, mesh):
            holders = mesh.topology.size_over(part.replicas)
            by_holders.setdefault(holders, []).append(part_of(_grad(factor), part))
    total: Tensor | None = None
    for holders, parts in sorted(by_holders.items()):
        own = torch.stack(norm_of_each(parts, dtype=torch.float64)).square().sum().view(1)
        if holders > 1:
            own /= holders
        total = own if total is None else total + own
    return torch.zeros(1, dtype=torch.float64, device=mesh.device) if total is None else total


def _joined(numbers: list[Tensor]) -> Tensor:
    """`[1]` of each of K adapters -> `[K]`."""
    return numbers[0] if len(numbers) == 1 else torch.cat(numbers)  # mostly one: no copy then


def _parts(factor: Factor, mesh: Mesh) -> list[GradPart]:
    return factor.rule.parts(rank=mesh.tp.rank, size=mesh.tp.size)
