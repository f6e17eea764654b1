"""From examples to the padded micro-batches of one dp rank.

Owns: which options of a run padding depends on. Does not own: which examples, in which order (`data.sampler`), padding
itself (`data.collate`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshlora.data import Batch, TokenizedDataset, collate, share
from meshlora.parallel.groups import Mesh


def micro_batches(
    data: TokenizedDataset, indices: np.ndarray, *, mesh: Mesh, micro_batch_size: int, pad_token_id: int
) -> Iterator[Batch]:
    """This dp rank's share of the examples `indices`, padded; every rank gets the same number of micro-batches.

    Each row knows its place in the global batch, whoever computes it.
    """
    rows = data.rows_per_example
    parts = share(
        np.arange(len(indices)), dp_rank=mesh.dp.rank, dp_size=mesh.dp.size, micro_batch_size=micro_batch_size
    )
    for part in parts:
        batch = collate(
            [sequence for place in part for sequence in data.example(int(indices[place]))],
            pad_token_id=pad_token_id,
            token_multiple=mesh.tp.size if mesh.topology.sp else 1,
            columns=tuple(data.columns),
            places=[int(place) * rows + row for place in part for row in range(rows)],
        )
        yield batch.to(mesh.device)
