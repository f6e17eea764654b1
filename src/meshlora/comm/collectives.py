"""Collectives on training tensors, each with its gradient.

Owns: the eight differentiable collectives of tensor, sequence and expert parallelism, and plain ones without gradient.
Does not own: where they are called (`model.regions`, `layers.linear`), or gradient sums.

A name gives the layout before and after, which fixes the gradient. *one*: a value replicated on all ranks. *each*:
every rank holds its own part (a slice, or a term of a sum). All work on dim 0, out of place: autograd or a trace may
hold the input. `axis.size == 1` is handled here, not by callers.

For every pair f, f*: `<f(x), y> == <x, f*(y)>`, where a replicated value counts once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from meshlora.comm import direct
from meshlora.comm.groups import Axis
from meshlora_ground.slow_paths import OVER_CPU, take

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _together(name: str, ours: Callable[..., Any], torchs: Callable[..., Any], axis: Axis, *given: Any) -> Any:
    """Run collective `name` on `given`, tensor first: over direct messages for CPU tensors if possible, else torch."""
    with axis.arrivals.at(name, axis.ranks):
        if axis.is_direct and given[0].is_cpu:
            return ours(*given, axis)
        if axis.is_direct:  # gloo, and the tensor on a GPU: torch copies it over the host
            take(OVER_CPU, given[0].device)
        return torchs(*given, group=axis.group)


def all_reduce_sum(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks of `axis`, out of place and without a gradient."""
    if axis.size == 1:
        return tensor
    return _together("all_reduce", direct.all_reduce_apart, _all_reduce_apart, axis, tensor)


def _all_reduce_apart(tensor: Tensor, *, group: Any) -> Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)  # autograd or a trace may hold the input
    dist.all_reduce(result, group=group)
    return result


def all_reduce_in_place(tensor: Tensor, axis: Axis) -> Tensor:
    """As `all_reduce_sum`, for a contiguous tensor that neither autograd nor a trace holds."""
    if axis.size > 1:
        _together("all_reduce", direct.all_reduce, dist.all_reduce, axis, tensor)
    return tensor


def all_gather(tensor: Tensor, axis: Axis) -> Tensor:
    """`[n, ...]` on each rank -> `[n * size, ...]`, in rank order; without a gradient."""
    if axis.size == 1:
        return tensor
    result = tensor.new_empty((tensor.shape[0] * axis.size, *tensor.shape[1:]))
    all_gather_into(result, tensor.contiguous(), axis)
    return result


def all_gather_into(result: Tensor, tensor: Tensor, axis: Axis) -> None:
    """Flat `[n]` on each rank -> the caller's `result` `[n * size]`, in rank order; `tensor` may be its slice of it."""
    _together("all_gather", direct.all_gather, _all_gather, axis, result, tensor)


def reduce_scatter_sum(tensor: Tensor, axis: Axis) -> Tensor:
    """`[n * size, ...]` -> `[n, ...]`: this rank's slice of the sum over ranks; without a gradient."""
    if axis.size == 1:
        return tensor
    result = tensor.new_empty((_share(tensor, axis), *tensor.shape[1:]))
    _together("reduce_scatter", direct.reduce_scatter, _reduce_scatter, axis, result, tensor.contiguous())
    return result


def local_slice(tensor: Tensor, axis: Axis) -> Tensor:
    """`[n * size, ...]` -> `[n, ...]`: this rank's slice. A copy, so the whole can be freed."""
    if axis.size == 1:
        return tensor
    return tensor.narrow(0, axis.rank * _share(tensor, axis), _share(tensor, axis)).clone()


def exchange_rows(tensor: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """All-to-all on dim 0, without a gradient: `send[i]` rows go to rank i of `axis`, `receive[i]` come from it.

    `[sum(send), ...]`, in the order of the ranks -> `[sum(receive), ...]`, in the order of the ranks.
    """
    if axis.size == 1:
        return tensor
    result = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    parts = result, tensor.contiguous(), list(receive), list(send)
    _together("all_to_all", direct.exchange, dist.all_to_all_single, axis, *parts)
    return result


def broadcast_in_place(tensor: Tensor, axis: Axis) -> Tensor:
    """Overwrite `tensor` on every rank with the group's first rank's, which is sent without a copy."""
    if axis.size > 1:
        _together("broadcast", direct.broadcast, functools.partial(dist.broadcast, group_src=0), axis, tensor)
    return tensor


def broadcast_text(text: str, axis: Axis, device: torch.device) -> str:
    """The text of the group's first rank, on all."""
    content = bytearray(text.encode())
    size = int(broadcast_in_place(torch.tensor([len(content)], device=device), axis).item())
    if not size:  # `frombuffer` takes no empty buffer
        return ""
    if axis.rank != 0:
        content = bytearray(size)
    held = torch.frombuffer(content, dtype=torch.uint8).to(device)
    return bytes(broadcast_in_place(held, axis).tolist()).decode()


def broadcast_of(tensor: Tensor | None, like: Tensor, axis: Axis, *, source: int, device: torch.device) -> Tensor:
    """`tensor` of rank `source` of `axis`, the others of which give None, on all of them. like: its shape and dtype."""
    # Zeros, never what the memory held: a source that has no tensor, which is a fault, is the same fault each time.
    own = torch.zeros_like(like, device=device) if tensor is None else tensor
    rows = own.reshape(1, -1)
    receive = [0] * axis.size
    receive[source] = 1
    if axis.rank == source:
        return exchange_rows(torch.cat([rows] * axis.size), axis, [1] * axis.size, receive).view(like.shape)
    return exchange_rows(rows[:0], axis, [0] * axis.size, receive).view(like.shape)


def _share(tensor: Tensor, axis: Axis) -> int:
    assert tensor.shape[0] % axis.size == 0, (tuple(tensor.shape), axis.size)
    return tensor.shape[0] // axis.size


_Primitive = Callable[[Tensor, Axis], Tensor]


class _Movement(Function):
    """One primitive forward, its adjoint backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, move: _Primitive, move_back: _Primitive) -> Tensor:
        ctx.axis, ctx.move_back = axis, move_back  # no tensor is saved: movements are linear
        return move(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.move_back(grads[0], ctx.axis), None, None, None


def _move(x: Tensor, axis: Axis, move: _Primitive, move_back: _Primitive) -> Tensor:
    return x if axis.size == 1 else _Movement.apply(x, axis, move, move_back)


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def copy_one_to_each(x: Tensor, axis: Axis) -> Tensor:
    """one -> each. forward: identity; backward: sum over `axis`. Enters a split region."""
    return _move(x, axis, _identity, all_reduce_sum)


def reduce_each_to_one(x: Tensor, axis: Axis) -> Tensor:
    """each -> one. forward: sum over `axis`; backward: identity. Leaves a split region."""
    return _move(x, axis, all_reduce_sum, _identity)


def reduce_each_to_each(x: Tensor, axis: Axis) -> Tensor:
    """each -> each. forward: sum over `axis`; backward: sum over `axis`.

    For a sum that each rank then uses on its own: its gradient on each rank is one term.
    """
    return _move(x, axis, all_reduce_sum, all_reduce_sum)


def gather_each_to_each(x: Tensor, axis: Axis) -> Tensor:
    """each -> each. forward: all-gather on dim 0; backward: reduce-scatter. Enters a split region under sp.

    Every rank gets all tokens, and its gradient for them is one term of a sum.
    """
    return _move(x, axis, all_gather, reduce_scatter_sum)


def reduce_scatter_each_to_each(x: Tensor, axis: Axis) -> Tensor:
    """each -> each. forward: reduce-scatter on dim 0; backward: all-gather. Leaves a split region under sp."""
    return _move(x, axis, reduce_scatter_sum, all_gather)


def gather_each_to_one(x: Tensor, axis: Axis) -> Tensor:
    """each -> one. forward: all-gather on dim 0; backward: this rank's slice.

    For replicated computation afterwards: the gradient is already complete on every rank.
    """
    return _move(x, axis, all_gather, local_slice)


def slice_one_to_each(x: Tensor, axis: Axis) -> Tensor:
    """one -> each. forward: this rank's slice of dim 0; backward: all-gather. Inverse of `gather_each_to_one`."""
    return _move(x, axis, local_slice, all_gather)


def exchange_each_to_each(x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """each -> each. forward: all-to-all on dim 0; backward: the reverse exchange."""
    if axis.size == 1:
        return x

    def there(t: Tensor, a: Axis) -> Tensor:
        return exchange_rows(t, a, send, receive)

    def back(t: Tensor, a: Axis) -> Tensor:
        return exchange_rows(t, a, receive, send)

    return _move(x, axis, there, back)
