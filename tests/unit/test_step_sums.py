"""The statistics of a step: what is not finite is found, whichever of loss and norm it is."""

from __future__ import annotations

import math

import pytest
import torch

from meshlora.comm.groups import open_mesh
from meshlora.run.step_sums import StepResult, StepSums
from meshlora.train.batch import Batch
from meshlora_ground.topology import Topology


def _read(losses: list[float], norm: float) -> StepResult:
    """Of two micro-batches with these losses, of two tokens each."""
    sums, ids = StepSums(open_mesh(Topology()), [""]), torch.zeros(1, 2, dtype=torch.int64)
    for loss in losses:
        sums.add(0, Batch(ids, ids, ids, 2, ids), 2, torch.tensor(loss), {})
    totals, norms = torch.tensor([4]), torch.tensor([norm], dtype=torch.float64)
    (result,) = sums.read(totals, norms, is_asked=False)
    return result


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_step_is_finite_if_its_loss_and_its_norm_are(bad: float) -> None:
    assert _read([1.0, 2.0], 3.0).is_finite
    assert _read([1.0, 2.0], 1e300).is_finite
    assert not _read([1.0, bad], 3.0).is_finite
    assert not _read([1.0, 2.0], bad).is_finite
    assert not _read([bad, 2.0], -bad).is_finite


def test_losses_of_micro_batches_are_added_and_left_as_they_are() -> None:
    loss = torch.tensor(1.0, dtype=torch.float64)
    sums, ids = StepSums(open_mesh(Topology()), [""]), torch.zeros(1, 2, dtype=torch.int64)
    for _ in range(3):
        sums.add(0, Batch(ids, ids, ids, 2, ids), 2, loss, {})
    (result,) = sums.read(torch.tensor([6]), torch.zeros(1, dtype=torch.float64), is_asked=False)
    assert (result.loss, float(loss), result.tokens) == (0.5, 1.0, 6)
