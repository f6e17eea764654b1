"""The order in which a pp rank computes the forwards and backwards of a step's micro-batches.

Owns: 1F1B and interleaved 1F1B (Narayanan et al., 2021, section 2.2). Does not own: what a stage computes, and the
messages, which its forward and backward send and await themselves (`wings.stages.hold`).

Of torch.distributed.pipelining this is the order alone: its runtime needs a backend of torch's own, which ranks of one
machine do not open (`comm.groups.LocalGroup`), and one shape for all micro-batches of a run.
"""

from __future__ import annotations

from collections.abc import Iterator


def one_forward_one_backward(
    number: int, *, rank: int, size: int, interleave: int = 1
) -> Iterator[tuple[int, int, bool]]:
    """(micro-batch, stage, whether it is its forward) in the order of pp rank `rank` of `size`.

    Stage i is on rank i modulo `size`. A rank begins with so many forwards that no other waits for it; then each is
    followed by a backward, so that no more are in memory. On one rank each backward follows at once. Where a rank has
    several stages, it takes `size` micro-batches through one of them, then through the next; `size` divides `number`.
    """
    assert interleave == 1 or number % size == 0, (number, size)
    total, after = number * interleave, size - 1 - rank
    ahead = after
    if interleave > 1:  # the first backward comes when `size` micro-batches are through all stages of this rank
        ahead = 2 * after + (interleave - 1) * size
    ahead = min(ahead, total)

    def turn(index: int, *, is_forward: bool) -> tuple[int, int, bool]:
        round_, within = divmod(index, size * interleave)
        chunk, place = divmod(within, size)
        if not is_forward:  # through the stages of this rank in the other order
            chunk = interleave - 1 - chunk
        return round_ * size + place, chunk * size + rank, is_forward

    for index in range(total + ahead):
        if index < total:
            yield turn(index, is_forward=True)
        if index >= ahead:
            yield turn(index - ahead, is_forward=False)
