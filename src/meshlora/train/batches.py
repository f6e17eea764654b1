"""From examples to the padded micro-batches of one dp rank.

Owns: which options of a run padding depends on. Does not own: which examples, in which order (`data.sampler`), padding
itself (`data.collate`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshlora.data import Batch, TokenizedDataset, collate, joined, packed_share, share, with_positions
from meshlora.parallel.groups import Mesh


@dataclass(frozen=True)
class Batching:
    """How the examples of an optimizer step become the micro-batches of one dp rank.

    row_length: sequences are packed into rows of at most so many tokens; None: each has a row of its own.
    only: of the rows of an example the one that is taken; None: all.
    """

    mesh: Mesh
    micro_batch_size: int
    pad_token_id: int
    row_length: int | None = None
    only: int | None = None

    def rows(self, data: TokenizedDataset, indices: np.ndarray, *, dp_rank: int | None = None) -> list[list[list[int]]]:
        """The micro-batches of this rank, or of `dp_rank`: for each row the places of its sequences in the step.

        indices: the examples of the step.
        """
        each, dp = data.rows_per_example, self.mesh.dp
        options = {
            "dp_rank": dp.rank if dp_rank is None else dp_rank,
            "dp_size": dp.size,
            "micro_batch_size": self.micro_batch_size,
        }
        if self.row_length is not None:
            return packed_share(np.diff(data.offsets)[indices].tolist(), row_length=self.row_length, **options)
        parts = share(np.arange(len(indices)), **options)
        taken = range(each) if self.only is None else (self.only,)
        return [[[int(place) * each + row] for place in part for row in taken] for part in parts]

    def batches(self, data: TokenizedDataset, indices: np.ndarray) -> Iterator[Batch]:
        """This rank's share of the examples `indices`, padded; every rank gets the same number of micro-batches.

        Each sequence keeps the number of its place in the global batch, whoever computes it.
        """
        each = data.rows_per_example
        for rows in self.rows(data, indices):
            of_rows = [[data[int(indices[place // each]) * each + place % each] for place in row] for row in rows]
            batch = collate(
                [row[0] if self.row_length is None else joined(row) for row in of_rows],
                pad_token_id=self.pad_token_id,
                token_multiple=self.mesh.tp.size if self.mesh.topology.sp else 1,
                columns=tuple(data.columns),
                places=[row[0] for row in rows],
            )
            if self.row_length is not None:
                batch = with_positions(batch, [[len(s.input_ids) for s in row] for row in of_rows], rows)
            yield batch.to(self.mesh.device)
