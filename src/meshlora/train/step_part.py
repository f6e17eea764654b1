"""What a wing does within every optimizer step of a run, at the places where the Trainer asks.

Owns: the interface, of which each method does nothing by default. Does not own: which parts a run has (`run.trainer`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from meshlora.train.batch import Batch
from meshlora.train.batches import MicroBatch
from meshlora_ground.dataset import TokenizedDataset

Block = contextlib.AbstractContextManager[None]


class StepPart:
    """A part of each step. Every rank asks at the same places in the same order: a method may be collective."""

    def step(self, number: int, data: TokenizedDataset, indices: np.ndarray) -> Block:
        """Around all forwards and backwards of step `number`, from 0, on the sequences `indices` of `data`."""
        return contextlib.nullcontext()

    def count(self, batches: Sequence[MicroBatch], forward: Callable[[int, MicroBatch], object]) -> None:
        """Before the first of several micro-batches. forward: runs the model on (number, micro-batch)."""

    def before(self, number: int, batch: Batch) -> None:
        """Micro-batch `number` of this rank runs next."""

    def watching(self) -> Block:
        """Around the forward of a micro-batch."""
        return contextlib.nullcontext()

    def off(self) -> Block:
        """Around forwards of the frozen base."""
        return contextlib.nullcontext()

    def count_here(self, batch: Batch) -> None:
        """After the forward of the only micro-batch of a step."""

    def term(self, batch: Batch) -> Tensor | None:
        """What the micro-batch just run adds to its loss, summed over what the objective counts; None: nothing."""
        return None

    def finish(self) -> float | None:
        """The term of the whole step, over all ranks, after its last micro-batch; None: there is none."""
        return None
