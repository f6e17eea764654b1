"""What an objective reports beside its loss, against numbers written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshlora.data import Batch
from meshlora.train import objectives
from meshlora.train.objectives import Policy


def test_clipped_tokens_are_those_whose_gradient_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    # ratio, advantage, and whether the clipped product is the smaller one, at 0.8 and 1.3.
    tokens = [
        (1.0, 2.0, 0),
        (1.25, 2.0, 0),
        (2.0, 2.0, 1),
        (0.5, 2.0, 0),
        (2.0, -3.0, 0),
        (0.5, -3.0, 1),
        (2.0, 0.0, 0),
    ]
    ratio, advantage, is_cut = (torch.tensor([values], dtype=torch.float64) for values in zip(*tokens, strict=True))
    columns = {"advantage": advantage, "old_log_prob": -ratio.log(), "weight": torch.ones_like(ratio)}
    ids = torch.ones_like(ratio, dtype=torch.int64)
    batch = Batch(ids, ids, ids, len(tokens), ids, columns)
    monkeypatch.setattr(objectives, "batch_log_probabilities", lambda *_: torch.zeros_like(ratio))
    policy: Any = Policy(clip_low=0.2, clip_high=0.3, kl_coef=0.0)
    loss, sums = policy.loss(None, batch, None)
    assert sums["clip_fraction"].item() == is_cut.sum().item()
    cut = ratio.clamp(0.8, 1.3)
    expected = torch.where(is_cut > 0, cut, ratio) * advantage
    assert loss.item() == pytest.approx(-expected.sum().item(), abs=1e-12)
