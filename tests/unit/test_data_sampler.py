"""The global order of sequences, and its division among data-parallel ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlora.reading.sampler import GlobalBatches, epoch_order
from meshlora.train.batches import share
from meshlora_ground.errors import UserError

counts = st.integers(1, 60)
seeds = st.integers(0, 2**63)


@given(num_sequences=st.integers(0, 300), seed=seeds, epoch=st.integers(0, 10))
def test_epoch_order_is_a_permutation(num_sequences: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_sequences, seed=seed, epoch=epoch)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(num_sequences))


def test_epoch_order_changes_with_seed_and_epoch_and_only_with_them() -> None:
    first = epoch_order(100, seed=1, epoch=0)
    assert np.array_equal(first, epoch_order(100, seed=1, epoch=0))
    assert not np.array_equal(first, epoch_order(100, seed=2, epoch=0))
    assert not np.array_equal(first, epoch_order(100, seed=1, epoch=1))
    # Seed and epoch are two arguments, not a sum.
    assert not np.array_equal(epoch_order(100, seed=2, epoch=0), epoch_order(100, seed=1, epoch=1))


def test_epoch_order_stays_the_same_between_versions_so_that_a_run_resumes_on_its_own_data() -> None:
    # Recorded, on purpose: a change here breaks the resumption of every run that exists.
    assert epoch_order(10, seed=0, epoch=0).tolist() == [6, 3, 8, 1, 4, 5, 9, 2, 7, 0]
    assert epoch_order(10, seed=7, epoch=3).tolist() == [2, 1, 4, 8, 9, 3, 5, 7, 6, 0]


def test_epoch_order_does_not_read_or_move_numpys_global_state() -> None:
    before = np.random.get_state()[1].copy()  # noqa: NPY002 (the global state is what is tested)
    epoch_order(11, seed=5, epoch=0)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_a_caller_cannot_change_the_order_that_later_steps_see() -> None:
    batch = GlobalBatches(10, 4, seed=0).batch(0)
    with pytest.raises(ValueError, match="read-only"):
        batch[0] = 0


@given(num_sequences=counts, global_batch_size=counts, seed=seeds, first_epoch=st.integers(0, 3))
def test_an_epoch_sees_every_sequence_exactly_once(
    num_sequences: int, global_batch_size: int, seed: int, first_epoch: int
) -> None:
    batches = GlobalBatches(num_sequences, global_batch_size, seed)
    start = first_epoch * batches.steps_per_epoch
    seen = [batches.batch(start + step) for step in range(batches.steps_per_epoch)]
    assert sorted(np.concatenate(seen)) == list(range(num_sequences))
    assert all(len(batch) == global_batch_size for batch in seen[:-1])
    assert 1 <= len(seen[-1]) <= global_batch_size


def test_epochs_differ_in_order() -> None:
    batches = GlobalBatches(50, 50, seed=3)
    assert not np.array_equal(batches.batch(0), batches.batch(1))


@given(num=st.integers(1, 70), dp_size=st.integers(1, 9), micro_batch_size=st.integers(1, 9))
@settings(max_examples=300)
def test_shares_are_disjoint_cover_the_batch_and_are_equal_in_number(
    num: int, dp_size: int, micro_batch_size: int
) -> None:
    batch = epoch_order(num, seed=0, epoch=0)
    shares = [share(batch, dp_rank=rank, dp_size=dp_size, micro_batch_size=micro_batch_size) for rank in range(dp_size)]
    # Unequal counts hang the mesh in the collectives of the extra micro-batch.
    assert len({len(micro_batches) for micro_batches in shares}) == 1
    everything = np.concatenate([micro_batch for micro_batches in shares for micro_batch in micro_batches])
    assert sorted(everything) == sorted(batch)
    assert all(len(micro_batch) <= micro_batch_size for micro_batches in shares for micro_batch in micro_batches)
    # No micro-batch is a dummy on every rank: that would be work for nothing.
    assert all(any(len(micro_batches[j]) for micro_batches in shares) for j in range(len(shares[0])))


@given(num=st.integers(1, 40), dp_size=st.integers(1, 6))
def test_micro_batch_j_of_rank_d_takes_position_j_dp_plus_d(num: int, dp_size: int) -> None:
    batch = epoch_order(num, seed=1, epoch=0)
    for rank in range(dp_size):
        for j, micro_batch in enumerate(share(batch, dp_rank=rank, dp_size=dp_size, micro_batch_size=1)):
            position = j * dp_size + rank
            assert micro_batch.tolist() == batch[position : position + 1].tolist()


@given(num_sequences=counts, global_batch_size=counts, step=st.integers(0, 20), dp_size=st.integers(1, 8))
def test_a_step_takes_the_same_sequences_on_every_dp_size(
    num_sequences: int, global_batch_size: int, step: int, dp_size: int
) -> None:
    batch = GlobalBatches(num_sequences, global_batch_size, seed=9).batch(step)
    one = np.concatenate(share(batch, dp_rank=0, dp_size=1, micro_batch_size=2))
    assert one.tolist() == batch.tolist()
    # Dealing the shares back, a sequence from each rank in turn, gives the global order again.
    shares = [np.concatenate(share(batch, dp_rank=r, dp_size=dp_size, micro_batch_size=2)) for r in range(dp_size)]
    dealt = [own[turn] for turn in range(len(shares[0])) for own in shares if turn < len(own)]
    assert dealt == batch.tolist()


def test_a_rank_that_has_run_out_gets_an_empty_micro_batch() -> None:
    shares = [share(np.arange(5), dp_rank=rank, dp_size=4, micro_batch_size=1) for rank in range(4)]
    assert [[m.tolist() for m in micro_batches] for micro_batches in shares] == [
        [[0], [4]],
        [[1], []],
        [[2], []],
        [[3], []],
    ]


@pytest.mark.parametrize(
    ("make", "given_value"),
    [
        (lambda: GlobalBatches(0, 4, 0), "num_sequences=0"),
        (lambda: GlobalBatches(4, 0, 0), "global_batch_size=0"),
        (lambda: GlobalBatches(4, 4, -1), "seed=-1"),
        (lambda: epoch_order(4, seed=-1, epoch=0), "seed=-1"),
        (lambda: share(np.arange(4), dp_rank=0, dp_size=1, micro_batch_size=0), "micro_batch_size=0"),
    ],
)
def test_counts_that_make_no_sense_are_the_users_error(make: object, given_value: str) -> None:
    with pytest.raises(UserError) as error:
        make()  # type: ignore[operator]
    assert error.value.given == given_value
