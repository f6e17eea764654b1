"""Patterns that a diagnosis finds in the numbers of a failing tensor."""

from __future__ import annotations

import pytest
import torch

from meshlora_judge.diagnosis.symptoms import ratio_of
from meshlora_judge.unshard import Piece


@pytest.mark.parametrize("lengths", [(3, 1), (1, 1, 1, 1), (2, 2)])
def test_offset_is_that_of_all_rows_of_a_rank_however_short_its_sequences_are(lengths: tuple[int, ...]) -> None:
    """A mean over tp in place of a sum, to which the bias is then added whole."""
    whole = torch.randn(4, 5, dtype=torch.float64)
    ours, rows = 0.5 * whole + 3, torch.arange(4).split(list(lengths))
    pieces = [Piece(0, (0,), ours[own], rows=own) for own in rows]
    assert ratio_of(pieces, whole, 1e-6) == pytest.approx(0.5)
    pieces[0] = Piece(0, (0,), ours[rows[0]] + whole[rows[0]], rows=rows[0])
    assert ratio_of(pieces, whole, 1e-6) is None
