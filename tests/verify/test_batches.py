"""The judge's batches are its own: a fault in the product's order, padding or labels shows; without one both agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshlora.reading.sampler import GlobalBatches
from meshlora.run.config.run_file import TrainConfig
from meshlora.train.collation import collate
from meshlora.verify.options import Request
from meshlora.verify.request import prepare_proof
from meshlora_ground.dataset import TokenizedDataset
from meshlora_judge.batches import UNTRAINED, micro_batches, micro_batches_of
from meshlora_judge.case import num_sequences_for, random_tokens
from tests.for_each import for_each


@pytest.fixture(scope="module")
def data() -> TokenizedDataset:
    return random_tokens(num_sequences=16, vocab_size=50, seed=3)


@for_each("seed", [0, 7])
@for_each("step", range(5))
def test_both_sides_make_the_same_batches(step: int, seed: int, data: TokenizedDataset) -> None:
    """Over a batch that is not full, and over the end of an epoch."""
    indices = GlobalBatches(len(data), 9, seed).batch(step)
    ours = [collate([data[int(i)] for i in indices[j : j + 2]], pad_token_id=1) for j in range(0, len(indices), 2)]
    settings = TrainConfig("unused", steps=5, batch_size=9, micro_batch_size=2, seed=seed)
    theirs = micro_batches_of(data, settings, step, pad_token_id=1)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.input_ids, b.input_ids)
        assert torch.equal(a.attention_mask, b.attention_mask)
        assert torch.equal(a.labels, b.labels)
        assert a.num_trained_tokens == b.num_tokens


def test_label_of_a_position_is_the_trained_token_after_it() -> None:
    ids, is_trained = np.array([5, 6, 7, 8, 9], dtype=np.int32), np.array([True, False, True, True, False])
    data = TokenizedDataset(ids, is_trained, np.array([0, 3, 5]))
    settings = TrainConfig("unused", steps=1, micro_batch_size=2)
    (batch,) = micro_batches(data, [0, 1], settings, pad_token_id=0)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.labels.tolist() == [[UNTRAINED, 7, UNTRAINED], [UNTRAINED] * 3]


def test_case_ends_with_a_batch_that_is_not_full_and_a_second_epoch() -> None:
    batches = GlobalBatches(num_sequences_for(9, 3), 9, seed=0)
    assert [len(batches.batch(step)) for step in range(3)] == [9, 8, 9]
    assert batches.steps_per_epoch == 2
    assert num_sequences_for(9, 1) == 9


@pytest.mark.parametrize("shortest", [1, 2])
def test_a_step_has_sequences_as_short_as_can_be_and_first_tokens_that_are_trained(shortest: int) -> None:
    data = random_tokens(num_sequences=5, vocab_size=50, seed=3, shortest=shortest)
    assert np.diff(data.offsets).min() == shortest
    firsts, starts = data.is_trained[data.offsets[:-1]], {tuple(sequence.input_ids[:1]) for sequence in data}
    assert 0 < firsts.sum() < len(data) == len(starts)
    # Of a prompt and an answer each has a token.
    assert all(sequence.is_trained[1:].any() == (len(sequence.input_ids) > 1) for sequence in data)


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_cp_rank_of_the_commands_case_has_as_many_tokens_as_a_row_has_documents(cp: int) -> None:
    """So that what takes its tokens for sequences is caught by `meshlora verify --packing auto`."""
    proof = prepare_proof(Request((f"cp={cp}",), family="llama", packing="auto"))
    assert "few_tokens" in proof.features_on(proof.topologies[0])
