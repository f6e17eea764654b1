"""Messages between neighbouring ranks, each with its gradient: in a channel of two ranks, or along an axis.

Owns: what passes between stages (`hand_on`, `take_over`), and what passes along an axis in turn or around it. Does not
own: movements in which all ranks of an axis do the same (`comm.collectives`), when messages are sent
(`wings.stages.pipeline_schedule`, `wings.context`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from meshlora.comm import direct
from meshlora.comm.collectives import exchange_rows
from meshlora.comm.groups import Axis


def open_channel(axis: Axis) -> None:
    """Open the sockets of `axis`, if it has any, before its first message. Collective over its ranks."""
    if axis.is_direct:
        direct.links_of(axis)


def send(tensor: Tensor, axis: Axis) -> None:
    """Send `tensor` to the other of the two ranks of `axis`, and do not wait until it has arrived."""
    with axis.arrivals.at("send", axis.ranks):
        if axis.is_direct and tensor.is_cpu:
            direct.send(tensor.contiguous(), axis)
        else:
            # A tensor must live until it has left.
            axis.leaving[:] = [work for work in axis.leaving if not work.is_completed()]
            axis.leaving.extend(_batch_of_one(dist.isend, tensor.contiguous(), axis))


def receive(into: Tensor, axis: Axis) -> Tensor:
    """`into`, filled by what the other of the two ranks of `axis` sends."""
    with axis.arrivals.at("receive", axis.ranks):
        if axis.is_direct and into.is_cpu:
            direct.receive(into, axis)
        else:
            for work in _batch_of_one(dist.irecv, into, axis):
                work.wait()  # on NCCL the device waits, not the host
    return into


def _batch_of_one(call: Callable[..., Any], tensor: Tensor, axis: Axis) -> list[Any]:
    """Begin a message to, or from, the other of the two ranks of `axis`; returns the works to wait for.

    NCCL runs a message outside a batch as a collective of its group, and torch warns of it. In one batch with others a
    message would have to wait for them. So each has a batch, and each direction a group, which on NCCL is a stream: a
    send that is not taken yet holds up those after it, and nothing else (`wings.stages.pipeline_schedule`).
    """
    operation = dist.P2POp(call, tensor, group=axis.group, group_peer=1 - axis.rank)
    if tensor.is_meta:  # of a simulated rank: torch looks for a backend of its device
        return [call(tensor, operation.peer, axis.group)]
    return dist.batch_isend_irecv([operation])


class _HandOn(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wants_gradient: Tensor, there: Axis, back: Axis) -> Tensor:
        ctx.back, ctx.shape, ctx.given = back, x.shape, {"dtype": x.dtype, "device": x.device}
        send(x.detach(), there)  # gradients go by the backward below
        return x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None, None]:
        return receive(torch.empty(ctx.shape, **ctx.given), ctx.back), None, None, None


def hand_on(x: Tensor, there: Axis | None, back: Axis | None) -> Tensor:
    """`[]`, 0. forward: send x over `there`; backward: receive its gradient over `back`, whatever that of the 0 is.

    Each side of `hand_on` and `take_over` calls it once for each of the same tensors, and so their backwards.
    """
    assert there is not None
    return _HandOn.apply(x, _signal(x), there, back)


class _TakeOver(Function):
    @staticmethod
    def forward(ctx: Any, wants_gradient: Tensor, like: Tensor, there: Axis, back: Axis) -> Tensor:
        ctx.back = back
        return receive(torch.empty_like(like, memory_format=torch.contiguous_format), there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        send(grads[0], ctx.back)
        return None, None, None, None


def take_over(like: Tensor, there: Axis | None, back: Axis | None) -> Tensor:
    """The other side of `hand_on`. forward: receive a tensor like `like` over `there`; backward: send its gradient."""
    assert there is not None
    return _TakeOver.apply(_signal(like), like.detach(), there, back)


def _signal(x: Tensor) -> Tensor:
    """What makes autograd call the backward of a function whose inputs may need no gradient."""
    return torch.zeros((), device=x.device, requires_grad=torch.is_grad_enabled())


def receive_from_neighbour(like: Tensor, axis: Axis, *, step: int) -> Tensor:
    """What the rank `step` before this one (1 or -1) gives `send_to_neighbour`; `like` as it is on the first rank.

    like: has its shape, that of all ranks. Every rank calls this, then `send_to_neighbour`, with the same `step`: they
    wait for each other in turn. Without a gradient.
    """
    before = axis.rank if step > 0 else axis.size - 1 - axis.rank
    # In each turn one pair of neighbours has something; the exchange is of all ranks.
    for turn in range(before):
        receive = [0] * axis.size
        receive[axis.rank - step] = len(like) * (turn == before - 1)
        rows = exchange_rows(like[:0], axis, [0] * axis.size, receive)
    return rows if before else like


def send_to_neighbour(tensor: Tensor, axis: Axis, *, step: int) -> None:
    """Give `tensor` to the rank `step` after this one (1 or -1), if there is one; see `receive_from_neighbour`."""
    after = axis.size - 1 - axis.rank if step > 0 else axis.rank
    for turn in range(after):
        send = [0] * axis.size
        send[axis.rank + step] = len(tensor) * (turn == 0)
        exchange_rows(tensor[: sum(send)], axis, send, [0] * axis.size)


def pass_on(tensor: Tensor, axis: Axis) -> Tensor:
    """Each rank's `tensor` goes to the next rank of `axis`, the last one's to the first; without a gradient.

    Returns the one of the rank before, of the same shape.
    """
    if axis.size == 1:
        return tensor
    number = tensor.shape[0]
    send, receive = [0] * axis.size, [0] * axis.size
    send[(axis.rank + 1) % axis.size] = receive[axis.rank - 1] = number
    return exchange_rows(tensor, axis, send, receive)
