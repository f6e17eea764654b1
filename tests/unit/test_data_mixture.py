"""Several sources are drawn by their weights, in an order that only the seed and the step decide."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshlora.reading.mixture import joined_sources, mixed_order, num_draws
from meshlora.reading.sampler import GlobalBatches
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.further_inputs import KnownInputs

PARTS = ((50, 3.0), (7, 1.0), (43, 1.0))


def dataset(*lengths: int, first: int = 0) -> TokenizedDataset:
    ids = np.arange(first, first + sum(lengths), dtype=np.int32)
    return TokenizedDataset(ids, ids % 2 == 0, np.cumsum([0, *lengths]), {"weight": ids.astype(np.float32)})


def test_each_source_has_its_share_of_the_draws_of_every_epoch() -> None:
    assert num_draws(PARTS) == [60, 20, 20]
    for epoch in range(3):
        order = mixed_order(PARTS, seed=1, epoch=epoch)
        of_source = np.searchsorted([50, 57, 100], order, side="right")
        assert np.bincount(of_source).tolist() == [60, 20, 20]
        assert (np.diff(of_source) != 0).sum() > 20, "they are mixed, not one after the other"


@pytest.mark.parametrize(
    ("weights", "draws"), [((1, 1, 1), [4, 3, 3]), ((0.1, 0.2, 0.7), [1, 2, 7]), ((1e-9, 1, 1), [0, 5, 5])]
)
def test_shares_are_whole_draws_that_make_up_the_epoch(weights: tuple[float, ...], draws: list[int]) -> None:
    assert num_draws(tuple(zip((4, 4, 2), weights, strict=True))) == draws


def test_examples_of_a_source_all_come_before_any_comes_again_across_epochs() -> None:
    drawn = np.concatenate([mixed_order(PARTS, seed=3, epoch=epoch) for epoch in range(7)])
    start = 0
    for number, _ in PARTS:
        own = drawn[(drawn >= start) & (drawn < start + number)]
        for first in range(0, len(own) - number + 1, number):
            assert sorted(own[first : first + number]) == list(range(start, start + number))
        start += number
    passes = drawn[(drawn >= 50) & (drawn < 57)][:14].reshape(2, 7)
    assert passes[0].tolist() != passes[1].tolist(), "each pass has an order of its own"


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    order = mixed_order(((40, 1.0), (40, 1.0)), seed=2, epoch=0)
    assert order[order < 40].tolist() != (order[order >= 40] - 40).tolist()


def test_a_batch_depends_on_the_seed_and_the_step_alone() -> None:
    batches = GlobalBatches(100, 8, 5, PARTS)
    late = batches.batch(29).tolist()
    mixed_order.cache_clear()
    assert GlobalBatches(100, 8, 5, PARTS).batch(29).tolist() == late
    assert GlobalBatches(100, 8, 6, PARTS).batch(29).tolist() != late
    whole = np.concatenate([batches.batch(step) for step in range(batches.steps_per_epoch)])
    assert whole.tolist() == mixed_order(PARTS, seed=5, epoch=0).tolist()


def test_sources_are_joined_end_to_end_with_all_that_belongs_to_a_token() -> None:
    found = joined_sources([dataset(2, 3), dataset(4, first=5)], ["a", "b"], [1.0, 2.0])
    assert [sequence.input_ids.tolist() for sequence in found] == [[0, 1], [2, 3, 4], [5, 6, 7, 8]]
    assert found.columns["weight"].tolist() == [float(number) for number in range(9)]
    assert found.is_trained.tolist() == [number % 2 == 0 for number in range(9)]
    assert found.parts == ((2, 1.0), (1, 2.0))
    assert joined_sources([dataset(2), dataset(2)], ["a", "b"], []).parts == ()


def test_a_source_that_would_never_be_drawn_and_images_are_refused() -> None:
    with pytest.raises(UserError, match="b: weight: its share of the 2 draws of an epoch is none"):
        joined_sources([dataset(2), dataset(2)], ["a", "b"], [1.0, 1e-6])
    with_more = TokenizedDataset(np.arange(2), np.ones(2, bool), np.array([0, 2]), further=KnownInputs([{}]))
    with pytest.raises(UnsupportedError, match="these are not joined"):
        joined_sources([with_more, with_more], ["a", "b"], [])


def test_examples_of_other_kinds_are_not_joined() -> None:
    """Else anchors of one source would take sequences of another as their negatives."""
    pairs, triples = (dataclasses.replace(dataset(*[2] * number), rows_per_example=number) for number in (2, 3))
    with pytest.raises(UserError, match="a, b: their examples are not of one kind"):
        joined_sources([pairs, triples], ["a", "b"], [])
