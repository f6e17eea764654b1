"""From examples to the padded micro-batches of one dp rank.

Owns: which run options affect padding; whose examples are which (`share`); the assignment of rows to adapters. Does not
own: the order of examples (`reading.sampler`), rows of several sequences (`train.packing`), padding itself
(`train.collation`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from meshlora.comm.groups import Mesh
from meshlora.plan.token_order import token_order
from meshlora.train.batch import Batch
from meshlora.train.collation import collate
from meshlora.train.packing import joined, packed_rows, with_positions
from meshlora_ground.dataset import Sequence as TokenSequence
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError

Step = tuple[TokenizedDataset, np.ndarray]  # of one adapter: its data, the indices of the step's examples
Masks = Callable[[Batch], AbstractContextManager[None]]  # around a forward, for the dropout of its step
Example = tuple[int, int]  # index of the adapter's step; position of the example in that step
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
        rank = self.mesh.dp.rank if dp_rank is None else dp_rank
        if self.row_length is not None:
            found = self._packed(steps, self.row_length, rank)
        else:
            found = self._dealt(steps, rank)
        while len(found) % self.multiple:
            found.append([])
        return found

    def _dealt(self, steps: Sequence[Step], dp_rank: int) -> list[list[Row]]:
        """Each sequence in a row of its own, or under `joins` those of an adapter in one."""
        examples: list[Example] = []
        for number, (_, indices) in enumerate(steps):
            examples += [(number, place) for place in range(len(indices))]
        order, found = np.arange(len(examples)), []
        for part in share(order, dp_rank=dp_rank, dp_size=self.mesh.dp.size, micro_batch_size=self.micro_batch_size):
            rows: list[Row] = []
            for position in part:
                rows += self._of_example(examples[position], steps)
            if self.joins:
                rows = _joined(rows)
            found.append(rows)
        return found

    def _of_example(self, example: Example, steps: Sequence[Step]) -> list[Row]:
        """The rows of an example that this run takes: all, or the one of them that `only` says."""
        number, place = example
        data, _ = steps[number]
        first = place * data.rows_per_example
        if self.only is not None:
            return [(number, [first + self.only])]
        return [(number, [first + row]) for row in range(data.rows_per_example)]

    def _packed(self, steps: Sequence[Step], row_length: int, dp_rank: int) -> list[list[Row]]:
        """The packed rows of each micro-batch of `dp_rank`. A row holds sequences of one adapter."""
        of_ranks: list[list[Row]] = [[] for _ in range(self.mesh.dp.size)]
        for number, (data, indices) in enumerate(steps):
            lengths = np.diff(data.offsets)[indices].tolist()
            for rows, packed in zip(of_ranks, packed_rows(lengths, len(of_ranks), row_length), strict=True):
                rows += [(number, row) for row in packed]
        # As many micro-batches on every rank as the one with the most rows needs: their collectives must match.
        starts = range(0, max(map(len, of_ranks)), self.micro_batch_size)
        return [of_ranks[dp_rank][start : start + self.micro_batch_size] for start in starts]

    def micro_batches(self, steps: Sequence[Step]) -> Iterator[MicroBatch]:
        """This rank's share of `steps`, padded. Each sequence keeps its position in its adapter's global batch."""
        for rows in self.rows(steps):
            batch = self._collated(steps, rows)
            whole = batch.to(self.mesh.device)
            # A rank without rows still joins all collectives: it runs a row of padding as the first adapter's.
            numbers = Counter([number for number, _ in rows] or [0])
            owners, stop = [], 0
            for number, size in numbers.items():  # in order: rows of one adapter are adjacent
                start, stop = stop, stop + size
                own = whole
                if len(numbers) > 1:  # cut on the host, where labels are counted without waiting for the device
                    own = batch.rows(start, stop).to(self.mesh.device)
                owners.append(Own(number, own))
            yield MicroBatch(whole, tuple(owners))

    def _collated(self, steps: Sequence[Step], rows: Sequence[Row]) -> Batch:
        """The micro-batch of `rows`, on the host."""
        first, _ = steps[0]
        sequences, lengths, places = list[TokenSequence](), list[list[int]](), list[list[int]]()
        for number, in_step in rows:
            row = [_sequence(steps[number], place) for place in in_step]
            if self.packs:
                sequences.append(joined(row))
            else:
                sequences += row
            lengths.append([len(sequence.input_ids) for sequence in row])
            places.append(in_step)
        batch = collate(
            sequences,
            pad_token_id=self.pad_token_id,
            token_multiple=self.mesh.token_cut.size // self.mesh.cp.size,
            row_multiple=self.mesh.cp.size,
            columns=tuple(first.columns),
            places=[of_row[0] for of_row in places],
            num_targets=0 if first.targets is None else first.targets.shape[1],
            predicts_next=first.predicts_next,
        )
        if self.only is None:
            batch = dataclasses.replace(batch, rows_per_example=first.rows_per_example)
        if self.packs:
            batch = with_positions(batch, lengths, places)
        if self.mesh.cp.size > 1:
            batch = self._cut(batch)
        return batch

    def _cut(self, batch: Batch) -> Batch:
        """`batch` with the tokens of this cp rank as its own. Rows that are not packed are all dealt alike."""
        size, (num_rows, length) = self.mesh.cp.size, batch.input_ids.shape
        documents = batch.lengths
        if documents is None:
            documents = [[length]] * num_rows
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
    found: dict[int, list[int]] = {}  # adapter -> places
    for number, places in rows:
        found.setdefault(number, []).extend(places)
    return [*found.items()]


def _sequence(step: Step, place: int) -> TokenSequence:
    data, indices = step
    each = data.rows_per_example
    return data[int(indices[place // each]) * each + place % each]
