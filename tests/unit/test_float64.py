"""The lift: what is float32 in a float64 run becomes float64, and what is neither stays as it is."""

from __future__ import annotations

import pytest
import torch

from meshlora_ground.float64 import lift


def test_frequencies_and_positions_of_two_dtypes_have_a_product() -> None:
    """transformers below 5.23 rotates by `inv_freq.float() @ position_ids.float()`: the first stays float64."""
    frequencies, positions = torch.rand(2, 4, 1, dtype=torch.float64), torch.arange(5).expand(2, 1, 5)
    with lift():
        found = frequencies.float() @ positions.float()
        turned = torch.matmul(positions.float().mT, frequencies.mT)
        low = frequencies.to(torch.bfloat16) @ positions.to(torch.bfloat16)
    assert torch.equal(found, frequencies * positions)
    assert torch.equal(turned, found.mT)
    assert low.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="expected"):
        frequencies @ positions.float()


def test_an_image_is_sampled_at_coordinates_of_another_dtype() -> None:
    """glm4v takes positions from a table in float64 at coordinates that are integers made float32."""
    table, where = torch.rand(1, 3, 4, 4, dtype=torch.float64), torch.rand(1, 5, 1, 2)
    sample = torch.nn.functional.grid_sample
    with lift():
        found = sample(table.to(torch.float32), where, mode="bicubic", align_corners=False)
    assert torch.equal(found, sample(table, where.double(), mode="bicubic", align_corners=False))
    with pytest.raises(RuntimeError, match="expected scalar type"):
        sample(table, where, align_corners=False)
