"""Slow paths: what a run does that costs speed or memory where a better way is to be had, each with its way out.

Owns: what one is, those that code finds as it takes them, and watching for these. Does not own: those that are known
before a run (`run.slow_paths`), and what a run makes of all of them (`run.trainer`).

Code that takes one says so by `take`, which costs a look at a variable and never waits for a device. A watcher hears
it from any thread, as backwards run in threads of their own:

    with watching() as taken:
        loss.backward()
    print(*taken, sep="\\n")
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_EVERYWHERE = ("cpu", "cuda")


@dataclass(frozen=True)
class SlowPath:
    """One of them, in words: "what: cause; way_out". devices: types of those that have a better way."""

    what: str
    cause: str
    way_out: str
    devices: tuple[str, ...] = _EVERYWHERE

    def __str__(self) -> str:
        return f"{self.what}: {self.cause}; {self.way_out}"


WHOLE_MASK = SlowPath(
    "attention of joined sequences with a mask of the whole row",
    "transformers' rule of packed rows is not known here, or this attention depends on more than positions",
    "data.packing: false",
)
ONE_BY_ONE = SlowPath(
    "attention of joined sequences one after the other",
    "there is a kernel for all at once in torch from 2.11 on, in bfloat16 and float16, without windows, caps and sinks",
    "model.dtype: bfloat16, another torch, or data.packing: false",
    ("cuda",),
)
PADDING_MASK = SlowPath(
    "a mask for padded rows, and the host waits to see whether there is padding",
    "this model must be told where padding is",
    "data.packing: auto or true, or train.micro_batch_size: 1",
    ("cuda",),
)
EXPERTS_ONE_BY_ONE = SlowPath(
    "products of experts one after the other",
    "the kernel for all at once computes in bfloat16, on GPUs from compute capability 8.0 on, in rows of 16 bytes",
    "model.dtype: bfloat16, and r a multiple of 8",
    ("cuda",),
)
UNPACKED_IN_PIECES = SlowPath(
    "quantised matrices unpacked in pieces", "a whole one has more than 268 million elements", "a larger tp", ("cuda",)
)
UNPACKED_WITHOUT_KERNEL = SlowPath(
    "matrices of bitsandbytes' kinds unpacked without its kernel",
    "a cut of this topology crosses their blocks, or the kernel gives other numbers on this GPU",
    "a smaller tp, or another bitsandbytes",
    ("cuda",),
)
UNPACKED_FOR_BACKWARD = SlowPath(
    "matrices in float8 unpacked for the products of their backward",
    "the checkpoint has a scale for each output, along which these sum, and the kernel takes none there",
    "a checkpoint with a scale for each block or matrix, or without model.compute: its matrices stay in float8",
    ("cuda",),
)
OVER_CPU = SlowPath(
    "tensors of GPUs sent by way of the CPU",
    "the process group that the script opened is gloo's",
    'torch.distributed.init_process_group("nccl")',
    ("cuda",),
)
# All that `take` is called with, in the order in which ranks tell each other.
TAKEN: tuple[SlowPath, ...] = (WHOLE_MASK, ONE_BY_ONE, PADDING_MASK, EXPERTS_ONE_BY_ONE)
TAKEN += (UNPACKED_IN_PIECES, UNPACKED_WITHOUT_KERNEL, UNPACKED_FOR_BACKWARD, OVER_CPU)


class _Watcher:
    taken: set[SlowPath] | None = None


def take(path: SlowPath, device: torch.device) -> None:
    """Say that code takes `path`, on `device`. Nothing, where that has no better one or nobody watches."""
    if _Watcher.taken is not None and device.type in path.devices:
        _Watcher.taken.add(path)


@contextlib.contextmanager
def watching(taken: set[SlowPath] | None = None) -> Iterator[set[SlowPath]]:
    """Inside the block slow paths that are taken are added to `taken`, which is yielded; default: a new set."""
    before, own = _Watcher.taken, set() if taken is None else taken
    _Watcher.taken = own
    try:
        yield own
    finally:
        _Watcher.taken = before
