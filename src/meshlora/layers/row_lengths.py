"""The lengths of the sequences in the rows of the running forward, which the host knows and transformers would ask for.

Owns: who says them, and from when to when they hold. Does not own: what is made of them: attention to each sequence by
itself (`wings.packed_rows.by_sequence`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from meshlora.comm.groups import SharedByCopies
from meshlora_ground.compat import transformers_models


class Lengths(SharedByCopies):
    """The lengths of the sequences in each row of a model's running forward. One object per model.

    Attributes:
        of_rows: of each row, padding at its end included, summing to S; None: not known.
    """

    def __init__(self) -> None:
        self.of_rows: Sequence[Sequence[int]] | None = None
        self._next: Sequence[Sequence[int]] | None = None  # said for the forward that comes

    def next(self, of_rows: Sequence[Sequence[int]] | None) -> None:
        """Say the lengths of the next forward; without a call they are not known."""
        self._next = of_rows

    def begin(self) -> None:
        """A forward of the model begins."""
        self.of_rows, self._next = self._next, None


@contextlib.contextmanager
def rows_of(model: Any, lengths: Sequence[Sequence[int]] | None) -> Iterator[None]:
    """The block runs one forward of `model`, on packed rows whose sequences have these lengths; None: on others."""
    if lengths is None:
        yield
        return
    if all(len(of_row) == 1 for of_row in lengths):  # transformers' own rule for one sequence a row has no mask
        with transformers_models.no_rows_packed():
            yield
        return
    if (running := lengths_of(model)) is not None:
        running.next(lengths)
    with transformers_models.all_rows_packed():  # as the host knows: transformers would read the position ids
        yield


def lengths_of(model: Any) -> Lengths | None:
    """Those of `model`; None: nobody asks for them."""
    return vars(model).get("meshlora_lengths")
