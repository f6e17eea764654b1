"""Reward models: the loss of pairs in plain torch, and their records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from meshlora.reading.readers import READERS
from meshlora.run.heads import FORMULAS
from meshlora.train.batch import Batch
from meshlora.train.collation import collate
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError
from meshlora_ground.objectives.rewards import Reward

TINY = Path(__file__).parents[2] / "examples" / "tiny_base"
SCORES = torch.tensor([[0.3], [-0.2], [1.1], [1.4]], dtype=torch.float64)


def _batch(margins: list[float], rows: int = 4, **rest: Any) -> Batch:
    ids = torch.ones(rows, 3, dtype=torch.int64)
    targets = torch.tensor(margins).repeat_interleave(2)[:rows, None]
    return Batch(ids, ids, ids, 0, ids, targets=targets, rows_per_example=2, **rest)


def _loss(better: float, worse: float, margin: float, center: float) -> Tensor:
    """As TRL's RewardTrainer has it for one pair."""
    lead = torch.tensor(better - worse - margin, dtype=torch.float64)
    return -torch.log(torch.sigmoid(lead)) + center * (better + worse) ** 2


def test_loss_of_pairs_has_their_margins_and_the_square_of_their_sum() -> None:
    losses, values = FORMULAS[Reward](Reward(center=0.1), SCORES, _batch([0.25, -0.5]), None)
    expected = torch.stack([_loss(0.3, -0.2, 0.25, 0.1), _loss(1.1, 1.4, -0.5, 0.1)])
    assert torch.allclose(losses, expected, rtol=1e-12)
    assert values["accuracy"].tolist() == [1.0, 0.0]
    assert values["margin"].tolist() == pytest.approx([0.5, -0.3])
    assert values["score"].tolist() == pytest.approx([0.05, 1.25])


def test_a_batch_that_stands_in_for_none_has_no_pair_and_a_gradient() -> None:
    outputs = torch.ones(1, 1, requires_grad=True)
    losses, values = FORMULAS[Reward](Reward(), outputs, _batch([0.0], rows=1, is_dummy=True), None)
    losses.sum().backward()
    assert len(losses) == len(values["accuracy"]) == 0
    assert outputs.grad is not None
    assert not outputs.grad.any()


def _read(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> TokenizedDataset:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {"max_length": 32, "vocab_size": 2048, "say": None, "columns": None}
    return READERS["margins"](str(file), AutoTokenizer.from_pretrained(TINY), **(given | options))


def test_margins_stay_with_both_answers_of_their_pair(tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": " b", "rejected": " c d"}
    long = pair | {"chosen": " b" * 40, "margin": 9}
    data = _read(tmp_path, pair | {"margin": 0.5}, long, pair, pair | {"margin": -2}, too_long="drop")
    assert data.targets is not None
    assert data.targets[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0, -2.0, -2.0]
    batch = collate([data[4], data[5], data[0], data[1]], pad_token_id=1, num_targets=1)
    assert batch.targets is not None
    assert batch.targets[:, 0].tolist() == [-2.0, -2.0, 0.5, 0.5]
    plain = READERS["pairs"](
        str(tmp_path / "pairs.jsonl"), AutoTokenizer.from_pretrained(TINY), max_length=32, too_long="drop"
    )
    assert np.array_equal(plain.input_ids, data.input_ids), "the tokens of an answer are those of other objectives"


def test_a_margin_that_is_no_number_is_named_with_its_line(tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": " b", "rejected": " c"}
    with pytest.raises(UserError, match=r"pairs\.jsonl:2: margin is a string, not a finite number"):
        _read(tmp_path, pair, pair | {"margin": "much"})
