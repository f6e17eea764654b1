"""What sharding the base over dp adds to a step: the gathers of decoder layers, and what of their time shows.

Owns: the messages of `dp_shard`, and which of them run beside which kernels. Does not own: bytes of a layer's part
(`planner.base`), memory (`planner.memory`).

A layer is gathered before its forward and once more before its backward, one layer ahead: torch puts the gather on a
stream of its own, where it runs beside the kernels of the layer before it. Those of the first layer of either direction
have nothing to run beside. Here a gather runs beside kernels only, never beside other messages, and for a share of
their time (`Hardware.overlap_efficiency`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from meshlora.plan.topology import DATA
from meshlora.planner.communication import Message
from meshlora.planner.fake import Work
from meshlora.planner.hardware import Hardware
from meshlora.planner.kinds import Shrunk


def gathers_of(shrunk: Shrunk, shards: Sequence[int]) -> Iterator[Message]:
    """Of a micro-batch. shards: bytes of this rank's part of a layer of each kind; empty without dp_shard.

    A layer that is computed twice is not gathered a third time: its gather comes before its second forward.
    """
    for kind, num_bytes in enumerate(shards):
        for phase in ("forward", "backward") if num_bytes else ():
            yield Message(phase, "allgather", DATA, num_bytes, shrunk.order.count(kind), kind, is_ahead=True)


def gathers_s(
    messages: Sequence[Message],
    order: Sequence[int],
    recomputed: Sequence[bool],
    gpu: Hardware,
    *,
    ranks: int,
    is_network: bool,
    forward_s: Mapping[int, float],
    backward_s: Mapping[int, float],
) -> float:
    """Seconds by which gathers make a micro-batch longer: what nothing hides of them, and copies in and out.

    order: the kind of each layer. forward_s, backward_s: kind -> time of its kernels; a layer that is computed twice
    has both in its backward.
    """
    gathered = [m for m in messages if m.is_ahead]
    if not gathered:
        return 0.0
    each = {
        m.layer: gpu.message_s(m.wire_bytes(ranks), ranks=ranks, is_network=is_network)
        for m in gathered
        if m.phase == "forward"
    }
    backward = [backward_s[k] + again * forward_s[k] for k, again in zip(order, recomputed, strict=True)]
    total = 0.0
    directions = [([*order], [forward_s[k] for k in order]), ([*reversed(order)], backward[::-1])]
    for kinds, kernels_s in directions:
        hidden_s = [0.0, *(gpu.overlap_efficiency * s for s in kernels_s[:-1])]
        total += sum(max(0.0, each.get(k, 0.0) - s) for k, s in zip(kinds, hidden_s, strict=True))
    # Into the buffer of the gather, and out of it into memory of the matrices' own: read and written.
    copies: Counter[Work] = Counter()
    for message in gathered:
        for parts in (1, ranks):
            copies[Work(0, 2 * message.num_bytes * parts)] += message.calls
    return total + gpu.work_s(copies, is_half=False)
