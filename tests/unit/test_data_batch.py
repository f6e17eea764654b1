"""Padding, the shift of labels by one, and the dummy batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshlora.run.feeding import fitted
from meshlora.train.batch import IGNORED
from meshlora.train.collation import collate
from meshlora_ground.dataset import Sequence
from meshlora_ground.topology import Topology
from tests.for_each import for_each

PAD = 99


def sequence(ids: list[int], is_trained: list[bool] | None = None) -> Sequence:
    mask = [True] * len(ids) if is_trained is None else is_trained
    return Sequence(np.array(ids, dtype=np.int32), np.array(mask, dtype=bool))


def test_labels_are_shifted_once_and_untrained_targets_are_ignored() -> None:
    batch = collate([sequence([5, 6, 7, 8], [False, False, True, True])], pad_token_id=PAD)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8]]
    assert batch.labels.tolist() == [[IGNORED, 7, 8, IGNORED]]
    assert batch.num_trained_tokens == 2


def test_padding_is_on_the_right_unattended_and_unlabelled() -> None:
    batch = collate([sequence([1, 2, 3]), sequence([4, 5])], pad_token_id=PAD)
    assert batch.input_ids.tolist() == [[1, 2, 3], [4, 5, PAD]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.labels.tolist() == [[2, 3, IGNORED], [5, IGNORED, IGNORED]]
    assert batch.num_trained_tokens == 3


def test_a_token_equal_to_the_pad_token_is_still_trained() -> None:
    # Many models pad with eos: masking by value would never train the model to stop.
    batch = collate([sequence([1, PAD]), sequence([1, 2, 3])], pad_token_id=PAD)
    assert batch.labels.tolist() == [[PAD, IGNORED, IGNORED], [2, 3, IGNORED]]


def test_a_trained_first_token_is_not_counted_because_nothing_predicts_it() -> None:
    batch = collate([sequence([1, 2], [True, False])], pad_token_id=PAD)
    assert batch.labels.tolist() == [[IGNORED, IGNORED]]
    assert batch.num_trained_tokens == 0


def test_a_sequence_of_one_token_gives_no_label() -> None:
    batch = collate([sequence([1])], pad_token_id=PAD)
    assert batch.labels.tolist() == [[IGNORED]]


def test_tensors_are_int64() -> None:
    for sequences in ([sequence([1, 2])], []):
        batch = collate(sequences, pad_token_id=PAD)
        assert {batch.input_ids.dtype, batch.attention_mask.dtype, batch.labels.dtype} == {torch.int64}


@given(lengths=st.lists(st.integers(1, 40), max_size=9), token_multiple=st.integers(1, 16), data=st.data())
def test_batch_is_the_smallest_that_token_multiple_divides_and_loses_nothing(
    lengths: list[int], token_multiple: int, data: st.DataObject
) -> None:
    sequences = []
    for length in lengths:
        mask = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
        sequences.append(sequence(list(range(1, length + 1)), mask))
    batch = collate(sequences, pad_token_id=PAD, token_multiple=token_multiple)
    num_rows, length = batch.input_ids.shape

    assert num_rows * length % token_multiple == 0
    assert batch.attention_mask.shape == batch.labels.shape == (num_rows, length)
    shortest_allowed = max(lengths, default=2)
    assert all(num_rows * shorter % token_multiple for shorter in range(shortest_allowed, length))
    assert batch.num_trained_tokens == (batch.labels != IGNORED).sum() == sum(s.is_trained[1:].sum() for s in sequences)
    for row, (ids, attended) in enumerate(zip(batch.input_ids, batch.attention_mask, strict=True)):
        if sequences:
            assert ids[attended.bool()].tolist() == sequences[row].input_ids.tolist()


@pytest.mark.parametrize("token_multiple", [1, 2, 3, 8])
def test_a_dummy_batch_adds_no_token_and_attends_to_something(token_multiple: int) -> None:
    batch = collate([], pad_token_id=PAD, token_multiple=token_multiple)
    assert batch.input_ids.shape[0] == 1
    assert batch.input_ids.shape[1] >= 2
    assert batch.num_trained_tokens == 0
    assert (batch.labels == IGNORED).all()
    # A row that attends to nothing is a softmax over nothing: NaN, also in the gradients it should not have.
    assert batch.attention_mask.all()


@for_each("lengths", [[], [1], [2, 2], [7, 1, 3]])
@for_each(("cp", "sp"), [(2, 1), (3, 2), (5, 1)])
def test_a_cp_rank_takes_two_tokens_or_more_of_a_row(lengths: list[int], cp: int, sp: int) -> None:
    # A recurrent mixer takes a single one for one that is generated, and passes no state on.
    batch = collate([sequence([1] * n) for n in lengths], pad_token_id=PAD, row_multiple=cp, token_multiple=sp)
    rows, length = batch.input_ids.shape
    assert length % cp == 0
    assert length // cp >= 2
    assert rows * length // cp % sp == 0
    inputs = {"input_ids": torch.ones(rows, max(lengths, default=2), dtype=torch.int64)}
    topology = Topology(tp=sp, sp=sp > 1, cp=cp)
    assert fitted(inputs, topology, pad_token_id=PAD)["input_ids"].shape[1] // cp >= 2


@given(max_length=st.sampled_from([8, 16, 24]), lengths=st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_rounding_stays_within_a_max_length_that_the_multiple_divides(max_length: int, lengths: list[int]) -> None:
    # A model with learned positions has no position max_length.
    batch = collate([sequence([1] * n) for n in [*lengths, max_length - 1]], pad_token_id=PAD, token_multiple=8)
    assert batch.input_ids.shape[1] <= max_length
