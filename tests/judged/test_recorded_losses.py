"""What a recorded micro-batch is: rows of several sequences, and pairs that the trainer itself joins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshlora_judge.steps.losses import _labels_of_sides, is_packed

ROW = torch.tensor([[0, 1, 2, 0, 1]])
ONES = torch.ones(1, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"position_ids": torch.arange(5)[None]}, False),
        ({"position_ids": ROW}, True),
        ({"position_ids": ROW, "attention_mask": ONES}, True),
        # Padding: positions there are anything, and mean nothing.
        ({"position_ids": ROW, "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}, False),
        # A mask of queries and keys says itself where the borders are.
        ({"position_ids": ROW, "attention_mask": torch.ones(1, 1, 5, 5)}, False),
    ],
)
def test_positions_that_begin_again_without_padding_are_packed_rows(given: dict[str, Any], expected: bool) -> None:
    assert is_packed(given) is expected


def test_labels_of_joined_pairs_are_their_completions() -> None:
    given = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 0], [5, 7, 0, 0, 0], [5, 6, 9, 0, 0], [5, 8, 9, 4, 0]]),
        "prompt_attention_mask": torch.tensor([[1, 1], [0, 1]]),
        "chosen_attention_mask": torch.tensor([[1, 1], [1, 0]]),
        "rejected_attention_mask": torch.tensor([[1, 0, 0], [1, 1, 1]]),
    }
    no = -100
    expected = [[no, no, 7, 8, no], [no, 7, no, no, no], [no, no, 9, no, no], [no, 8, 9, 4, no]]
    assert _labels_of_sides(given).tolist() == expected
