"""Collectives on CPU tensors over direct messages: every rank sends every other rank its part at once.

Owns: all-reduce, all-gather, reduce-scatter, all-to-all and broadcast over an `Axis` whose group is gloo's or a
`comm.groups.LocalGroup`, as operators that dispatch modes see like torch's own. Does not own: when they are used
(`comm.collectives`), the sockets between ranks of one machine (`processes.links`).

gloo's collectives run around a ring, step by step through gloo's own queue, and add bfloat16 one element at a time.
Direct messages do neither: between ranks of one machine they use our own sockets, else gloo's send and receive.
`benchmarks/messages.py` prints both.

Sums are taken in rank order, so that all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from meshlora.comm.groups import Axis, LocalGroup
from meshlora.processes.links import Links, Meeting
from meshlora_ground.compat.torch_distributed import timeout_of

# Up to this size each rank sends everything to all others and sums by itself: one round instead of two.
ONE_ROUND_BYTES = 64 * 1024
_TORCHS_PATIENCE_S = 1800.0
_TAG = 27_701  # unlikely to be used by messages of a user's script

_library = torch.library.Library("meshlora_c10d", "DEF")
# By group name, which is what operators take.
_axes: WeakValueDictionary[str, Axis] = WeakValueDictionary()


def _operator(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function on (tensors, ..., axis) as an operator on (..., group name); returns a wrapper for axes."""
    name = signature[: signature.index("(")]
    _library.define(signature)

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            *given, group = arguments
            return function(*given, _axes[group])

        _library.impl(name, run, "CPU")
        operator = getattr(torch.ops.meshlora_c10d, name).default

        def call(*arguments: Any) -> Any:
            *given, axis = arguments
            _axes[axis.group.group_name] = axis
            return operator(*given, axis.group.group_name)

        call.__doc__ = function.__doc__
        return call

    return make


@_operator("allreduce_(Tensor(a!) tensor, str group) -> ()")
def all_reduce(tensor: Tensor, axis: Axis) -> None:
    """Sum over the ranks, in place; contiguous."""
    flat = tensor.view(-1)
    if axis.size == 2 or flat.numel() * flat.element_size() <= ONE_ROUND_BYTES:
        parts = _with_room(flat, axis)
        _exchange([flat] * axis.size, parts, axis)
        _add_up(parts, flat, axis)
    else:  # each rank sums its share of the elements, and tells the others the sums
        shares = flat.tensor_split(axis.size)
        own = shares[_rank(axis)]
        parts = _with_room(own, axis)
        _exchange(shares, parts, axis)
        _add_up(parts, own, axis)
        _exchange([own] * axis.size, shares, axis)


@_operator("allreduce(Tensor tensor, str group) -> Tensor")
def all_reduce_apart(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks, in new memory; for two ranks without a copy of `tensor`."""
    if axis.size > 2:
        result = tensor.clone(memory_format=torch.contiguous_format)
        all_reduce(result, axis)
        return result
    tensor = tensor.contiguous()
    other = torch.empty_like(tensor)
    _exchange([tensor] * 2, [other] * 2, axis)
    return other.add_(tensor)  # of two a sum does not depend on the order


@_operator("allgather_(Tensor(a!) result, Tensor tensor, str group) -> ()")
def all_gather(result: Tensor, tensor: Tensor, axis: Axis) -> None:
    """`tensor` of each rank -> `result`, in rank order; both contiguous. `tensor` may be its slice of `result`."""
    shares, own_rank = result.view(-1).tensor_split(axis.size), _rank(axis)
    if shares[own_rank].data_ptr() != tensor.data_ptr():
        shares[own_rank].copy_(tensor.view(-1))
    _exchange([tensor.view(-1)] * axis.size, shares, axis)


@_operator("reducescatter_(Tensor(a!) result, Tensor tensor, str group) -> ()")
def reduce_scatter(result: Tensor, tensor: Tensor, axis: Axis) -> None:
    """This rank's slice of the sum of `tensor` over the ranks -> `result`; both contiguous."""
    shares = tensor.view(-1).tensor_split(axis.size)
    parts = _with_room(shares[_rank(axis)], axis)
    _exchange(shares, parts, axis)
    _add_up(parts, result.view(-1), axis)


@_operator("alltoall_(Tensor(a!) result, Tensor tensor, int[] receive, int[] send, str group) -> ()")
def exchange(result: Tensor, tensor: Tensor, receive: Sequence[int], send: Sequence[int], axis: Axis) -> None:
    """`send[i]` rows of `tensor` go to rank i, `receive[i]` rows of `result` come from it; both contiguous."""
    shares, parts = tensor.split(list(send)), result.split(list(receive))
    own_rank = _rank(axis)
    parts[own_rank].copy_(shares[own_rank])
    _exchange(shares, parts, axis)


@_operator("broadcast_(Tensor(a!) tensor, str group) -> ()")
def broadcast(tensor: Tensor, axis: Axis) -> None:
    """`tensor` of the group's first rank -> `tensor` of all; contiguous."""
    flat, nothing = tensor.view(-1), tensor.new_empty(0)
    if _rank(axis) == 0:
        _exchange([flat] * axis.size, [nothing] * axis.size, axis)
    else:
        _exchange([nothing] * axis.size, [flat, *[nothing] * (axis.size - 1)], axis)


@_operator("send(Tensor tensor, str group) -> ()")
def send(tensor: Tensor, axis: Axis) -> None:
    """`tensor`, contiguous, to the other of two ranks. A thread waits for it to leave."""
    links_of(axis)  # here: it needs the other rank, which opens them too
    nothing = tensor.new_empty(0)
    outgoing = [nothing, nothing]
    outgoing[1 - _rank(axis)] = tensor
    axis.outbox.put(lambda: _exchange(outgoing, [nothing] * 2, axis))


@_operator("receive_(Tensor(a!) tensor, str group) -> ()")
def receive(tensor: Tensor, axis: Axis) -> None:
    """Into `tensor`, contiguous, what the other of two ranks has sent."""
    nothing = tensor.new_empty(0)
    incoming = [nothing, nothing]
    incoming[1 - _rank(axis)] = tensor
    _exchange([nothing] * 2, incoming, axis)


def _with_room(own: Tensor, axis: Axis) -> list[Tensor]:
    """`own` at this rank's place, and new memory of its shape at those of the others."""
    own_rank = _rank(axis)
    return [own if rank == own_rank else torch.empty_like(own) for rank in range(axis.size)]


def _rank(axis: Axis) -> int:
    """This process' rank in the group, from the group itself: message routing relies on nothing else."""
    assert axis.group is not None
    return axis.group.rank()


def links_of(axis: Axis) -> Links | None:
    """The sockets of `axis`, opened on its first message; None unless all its ranks can have them."""
    if not axis.links:
        axis.links.append(_open_links(axis))
    return axis.links[0]


def _open_links(axis: Axis) -> Links | None:
    """Collective over `axis`. Either all ranks get links or none does: they agree on it. Raises: RuntimeError: some
    ranks cannot reach each other, and there is no gloo to fall back on."""
    _told_to_all(b"here", axis)  # wait before making files: a rank killed while it waits leaves none behind
    meeting = Meeting(_rank(axis), axis.size)
    try:
        can = meeting.connect(_told_to_all(meeting.address, axis))
        if all(map(any, _told_to_all(bytes([can]), axis))):  # each tells one byte: 1 if it reached all below it
            return meeting.links()
    finally:
        meeting.give_up()
    if isinstance(axis.group, LocalGroup):
        raise RuntimeError(f"ranks {axis.ranks} have no sockets to each other: can files be made in TMPDIR or in /tmp?")
    return None


def _told_to_all(own: bytes, axis: Axis) -> list[bytes]:
    """All-gather `own`, of equal length on all ranks: through a local group's store, else over gloo's messages."""
    if isinstance(axis.group, LocalGroup):
        return axis.group.told_to_all(own)
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    found = _with_room(mine, axis)
    _exchange_over_gloo([mine] * axis.size, found, axis)
    return [one.numpy().tobytes() for one in found]


def _exchange(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], axis: Axis) -> None:
    """Send `outgoing[i]` to and receive `incoming[i]` from each other rank i. Empty tensors are not sent."""
    links = links_of(axis)
    if links is None:
        _exchange_over_gloo(outgoing, incoming, axis)
        return
    own_rank, to_each, from_each = _rank(axis), {}, {}
    for rank, (given, room) in enumerate(zip(outgoing, incoming, strict=True)):
        if rank == own_rank:  # the caller has put its own part in place
            continue
        if given.numel():
            to_each[rank] = given
        if room.numel():
            from_each[rank] = room
    links.exchange(to_each, from_each, timeout_s=_patience_s(axis))


def _patience_s(axis: Axis) -> float:
    """How long to wait for the other ranks of `axis`: the limit of `comm.patience` inside it, else the group's."""
    if axis.arrivals.timeout_s is not None:
        return axis.arrivals.timeout_s
    assert axis.group is not None
    if isinstance(axis.group, LocalGroup):
        return axis.group.timeout_s
    try:
        return timeout_of(axis.group).total_seconds()
    except RuntimeError:  # unknown to torch
        return _TORCHS_PATIENCE_S


def _exchange_over_gloo(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], axis: Axis) -> None:
    assert axis.group is not None
    own_rank = _rank(axis)
    # Each begins with the rank after it, so that not all send to the first one first.
    others = [(own_rank + step) % axis.size for step in range(1, axis.size)]
    works = [axis.group.send([outgoing[i]], i, _TAG) for i in others if outgoing[i].numel()]
    works += [axis.group.recv([incoming[i]], i, _TAG) for i in others[::-1] if incoming[i].numel()]
    patience = timedelta(seconds=_patience_s(axis))
    for work in works:
        work.wait(patience)


def _add_up(parts: Sequence[Tensor], result: Tensor, axis: Axis) -> None:
    """Write the sum of `parts`, taken in order, to `result`, which may be this rank's part."""
    if axis.size == 2:  # addition of two is commutative
        torch.add(parts[0], parts[1], out=result)
        return
    total = parts[0].clone()  # rank order on every rank, so that all get the same bits
    for part in parts[1:]:
        total += part
    result.copy_(total)
