"""From examples to the padded micro-batches of one dp rank.

Owns: which run options affect padding; whose examples are which (`share`); the assignment of rows to adapters. Does not
own: the order of examples (`reading.sampler`), rows of several sequences (`train.packing`), padding itself
(`train.batch`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshlora.comm.groups import Mesh
from meshlora.plan.token_order import token_order
from meshlora.train.batch import Batch, collate
from meshlora.train.packing import joined, packed_share, with_positions
from meshlora_ground.dataset import Sequence as TokenSequence
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError

Step = tuple[TokenizedDataset, np.ndarray]  # of one adapter: its data, the indices of the step's examples
Row = tuple[int, list[int]]  # index of the adapter's step; positions of the row's sequences in that step


@dataclass(frozen=True)
class Own:
    """The rows of adapter `number` of a micro-batch, as a batch of their own."""

    number: int
    batch: Batch


@dataclass(frozen=True)
class MicroBatch:
    """The rows that a rank runs at once. owners: the rows of each adapter, in order."""

    batch: Batch
    owners: tuple[Own, ...]


@dataclass(frozen=True)
class Batching:
    """How the examples of an optimizer step become the micro-batches of one dp rank.

    row_length: sequences are packed into rows of at most so many tokens; None: one sequence per row.
    joins: the sequences of a micro-batch are one row, those of each adapter.
    multiple: of the number of micro-batches, filled up with empty ones.
    only: index of the row to take of each example; None: all. balances: whether cp ranks get equal work of causal
        attention, or contiguous parts of each row.
    """

    mesh: Mesh
    micro_batch_size: int
    pad_token_id: int
    row_length: int | None = None
    only: int | None = None
    balances: bool = True
    multiple: int = 1
    joins: bool = False

    @property
    def packs(self) -> bool:
        """Whether a row may hold several sequences."""
        return self.joins or self.row_length is not None

    def rows(self, steps: Sequence[Step], *, dp_rank: int | None = None) -> list[list[Row]]:
        """The rows of each micro-batch of this rank, or of `dp_rank`; rows of one adapter are adjacent.

        Every rank gets the same number of micro-batches. Without packing, examples are dealt to the ranks round-robin
        across adapters, so ranks differ by at most one example, whatever the batch sizes are.
        """
        found = self._rows(steps, self.mesh.dp.rank if dp_rank is None else dp_rank)
        return found + [[] for _ in range(-len(found) % self.multiple)]

    def _rows(self, steps: Sequence[Step], rank: int) -> list[list[Row]]:
        if self.row_length is not None:
            of_ranks = [self._packed(steps, self.row_length, other) for other in range(self.mesh.dp.size)]
            starts = range(0, max(map(len, of_ranks)), self.micro_batch_size)
            return [of_ranks[rank][start : start + self.micro_batch_size] for start in starts]
        every = [(number, place) for number, (_, indices) in enumerate(steps) for place in range(len(indices))]
        parts = share(
            np.arange(len(every)),
            dp_rank=rank,
            dp_size=self.mesh.dp.size,
            micro_batch_size=self.micro_batch_size,
        )
        each = [data.rows_per_example for data, _ in steps]
        taken = [range(number) if self.only is None else (self.only,) for number in each]
        examples = [[every[position] for position in part] for part in parts]
        found = [[(n, [place * each[n] + row]) for n, place in part for row in taken[n]] for part in examples]
        return [_joined(rows) for rows in found] if self.joins else found

    def _packed(self, steps: Sequence[Step], row_length: int, dp_rank: int) -> list[Row]:
        """All packed rows of `dp_rank`. A row holds sequences of one adapter."""
        options = {"dp_rank": dp_rank, "dp_size": self.mesh.dp.size, "micro_batch_size": self.micro_batch_size}
        found = []
        for number, (data, indices) in enumerate(steps):
            lengths = np.diff(data.offsets)[indices].tolist()
            parts = packed_share(lengths, row_length=row_length, **options)
            found += [(number, row) for part in parts for row in part]
        return found

    def micro_batches(self, steps: Sequence[Step]) -> Iterator[MicroBatch]:
        """This rank's share of `steps`, padded. Each sequence keeps its position in its adapter's global batch."""
        first, _ = steps[0]
        for rows in self.rows(steps):
            of_rows = [[_sequence(steps[number], place) for place in places] for number, places in rows]
            batch = collate(
                [joined(row) if self.packs else row[0] for row in of_rows],
                pad_token_id=self.pad_token_id,
                token_multiple=self.mesh.token_cut.size // self.mesh.cp.size,
                row_multiple=self.mesh.cp.size,
                columns=tuple(first.columns),
                places=[places[0] for _, places in rows],
                num_targets=0 if first.targets is None else first.targets.shape[1],
                predicts_next=first.predicts_next,
            )
            if self.only is None:
                batch = dataclasses.replace(batch, rows_per_example=first.rows_per_example)
            if self.packs:
                lengths = [[len(sequence.input_ids) for sequence in row] for row in of_rows]
                batch = with_positions(batch, lengths, [places for _, places in rows])
            if self.mesh.cp.size > 1:
                batch = self._cut(batch)
            # A rank without rows still joins all collectives: it runs a row of padding as the first adapter's.
            groups = itertools.groupby([number for number, _ in rows] or [0])
            sizes = [(number, len(list(group))) for number, group in groups]
            whole = batch.to(self.mesh.device)
            if len(sizes) == 1:
                yield MicroBatch(whole, (Own(sizes[0][0], whole),))
                continue
            stops = list(itertools.accumulate(size for _, size in sizes))
            owners = [
                Own(number, batch.rows(stop - size, stop).to(self.mesh.device))
                for (number, size), stop in zip(sizes, stops, strict=True)
            ]
            yield MicroBatch(whole, tuple(owners))

    def _cut(self, batch: Batch) -> Batch:
        """`batch` with the tokens of this cp rank as its own. Rows that are not packed are all dealt alike."""
        size, length = self.mesh.cp.size, batch.input_ids.shape[1]
        documents = batch.lengths if batch.lengths is not None else [[length]] * len(batch.input_ids)
        order = token_order(documents, size=size, is_balanced=self.balances)
        return batch.cut(order, rank=self.mesh.cp.rank, size=size)

    def batches(self, data: TokenizedDataset, indices: np.ndarray) -> Iterator[Batch]:
        """This rank's share of the examples `indices` of one adapter, padded."""
        return (micro.batch for micro in self.micro_batches([(data, indices)]))


def share(global_indices: np.ndarray, *, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[np.ndarray]:
    """The micro-batches of one dp rank, each `[<= micro_batch_size]` indices.

    Position p of the global batch goes to rank p % dp: with micro-batches of one sequence, micro-batch j of rank d is
    position j·dp + d. Every rank gets the same number of micro-batches, as their collectives must match; a rank that
    has run out gets an empty one, which must add neither loss nor tokens (`collate([])`).

    Raises:
        UserError: `micro_batch_size` below 1.
    """
    if micro_batch_size < 1:
        raise UserError(f"micro_batch_size={micro_batch_size}", "must be at least 1")
    assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
    # Rank 0 has the most: its number of micro-batches is everyone's.
    num_sequences_of_rank_0 = -(-len(global_indices) // dp_size)
    num_micro_batches = -(-num_sequences_of_rank_0 // micro_batch_size)
    mine = global_indices[dp_rank::dp_size]
    return [mine[j * micro_batch_size : (j + 1) * micro_batch_size] for j in range(num_micro_batches)]


def _joined(rows: list[Row]) -> list[Row]:
    """One row of each adapter."""
    of_adapters = itertools.groupby(rows, key=lambda row: row[0])
    return [(number, [place for _, places in own for place in places]) for number, own in of_adapters]


def _sequence(step: Step, place: int) -> TokenSequence:
    data, indices = step
    each = data.rows_per_example
    return data[int(indices[place // each]) * each + place % each]
