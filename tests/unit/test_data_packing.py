"""Sequences that share a row: all of them, once, apart from each other, and evenly over the ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshlora.train.batch import IGNORED
from meshlora.train.batches import Batching
from meshlora.train.collation import collate
from meshlora.train.packing import Rows, joined, packed_rows, with_positions
from meshlora_ground.dataset import Sequence
from tests.for_each import for_each

ROW = 64


def _lengths(number: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, ROW + 1, number).tolist()


def _share(lengths: list[int], *, rank: int, dp: int, micro_batch_size: int) -> list[Rows]:
    mesh: Any = SimpleNamespace(dp=SimpleNamespace(rank=rank, size=dp))
    data: Any = SimpleNamespace(offsets=np.cumsum([0, *lengths]))
    batching = Batching(mesh, micro_batch_size, pad_token_id=0, row_length=ROW)
    return [[row for _, row in micro] for micro in batching.rows([(data, np.arange(len(lengths)))])]


@for_each("micro_batch_size", [1, 3])
@for_each("dp", [1, 2, 3, 5])
@for_each("number", [1, 4, 57])
def test_every_sequence_is_in_one_row_of_one_rank(number: int, dp: int, micro_batch_size: int) -> None:
    lengths = _lengths(number)
    shares = [_share(lengths, rank=rank, dp=dp, micro_batch_size=micro_batch_size) for rank in range(dp)]
    places = [place for share in shares for micro in share for row in micro for place in row]
    assert sorted(places) == list(range(number))
    assert len({len(share) for share in shares}) == 1, "the same number of micro-batches, for their collectives"
    for share in shares:
        assert all(len(micro) <= micro_batch_size for micro in share)
        assert all(sum(lengths[place] for place in row) <= ROW for micro in share for row in micro)
    tokens = [sum(lengths[place] for micro in share for row in micro for place in row) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_ranks_are_even_in_tokens_and_not_in_sequences() -> None:
    assert packed_rows([6, 2, 2, 2], 2, 6) == [[[0]], [[1, 2, 3]]]


def test_rows_are_fuller_than_without() -> None:
    lengths = _lengths(200)
    (rows,) = packed_rows(lengths, 1, ROW)
    assert len(rows) * ROW < 1.1 * sum(lengths)


def test_sequence_longer_than_a_row_is_alone() -> None:
    assert packed_rows([5, 9, 3], 1, 8) == [[[1], [0, 2]]]


def _sequence(*ids: int, trained_from: int = 0) -> Sequence:
    is_trained = np.arange(len(ids)) >= trained_from
    return Sequence(np.array(ids, np.int32), is_trained, {"weight": np.array(ids, np.float32) / 10})


def test_labels_and_columns_stay_within_their_sequence() -> None:
    """All tokens are trained, so that what crosses a border would have a label."""
    parts = [_sequence(11, 12, 13), _sequence(21, 22), _sequence(31)]
    batch = collate([joined(parts), joined([_sequence(41, 42, trained_from=1)])], pad_token_id=0, columns=("weight",))
    no = IGNORED
    assert batch.labels.tolist() == [[12, 13, no, 22, no, no], [42, no, no, no, no, no]]
    assert batch.num_trained_tokens == sum(len(s.input_ids) - 1 for s in parts) + 1
    assert batch.columns["weight"][0].tolist() == pytest.approx([1.2, 1.3, 0, 2.2, 0, 0])
    batch = with_positions(batch, [[3, 2, 1], [2]], [[5, 0, 2], [1]])
    places, positions = batch.tokens >> 32, batch.tokens & 0xFFFFFFFF
    assert places[:, :2].tolist() == [[5, 5], [1, 1]], "dropout's numbers are those of the unpacked run"
    assert places[0].tolist() == [5, 5, 5, 0, 0, 2]
    assert positions[0].tolist() == [0, 1, 2, 0, 1, 0]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]
    assert batch.to("cpu").position_ids is not None


def test_joining_leaves_the_sequences_as_they_are() -> None:
    parts = [_sequence(11, 12), _sequence(21, 22)]
    joined(parts)
    assert all(part.is_trained.all() for part in parts), "they are views of the data set"


def test_dummy_has_positions_and_no_labels() -> None:
    batch = with_positions(collate([], pad_token_id=0, token_multiple=4), [], [])
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]]
    assert (batch.is_dummy, batch.num_trained_tokens) == (True, 0)
