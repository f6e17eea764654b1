"""A reward model's loss is that of TRL's RewardTrainer with PEFT: tokens, margins, head and centre, in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import meshlora
from meshlora.adapter.formats.peft_format import lora_config, save_adapter
from meshlora.loading.blueprint import make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.reading.preferences import read_margins
from meshlora.reading.tokenizer import padding_token_id
from meshlora.run.heads import FORMULAS, outputs_of, set_padding
from meshlora.train.collation import collate
from meshlora_ground.objectives.rewards import Reward
from meshlora_ground.topology import Topology
from tests.pool import Pool

BASE = str(Path(__file__).parents[2] / "examples/tiny_base")
CENTER = 0.03
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}


def _rows(has_margins: bool) -> list[dict[str, Any]]:
    rows = []
    for number in range(5):
        row: dict[str, Any] = {"prompt": f"Return the item {number}", "chosen": f" of list {number}."}
        row["rejected"] = " no" * (number % 3 + 1)
        if has_margins:
            row["margin"] = 0.25 * number - 0.5
        rows.append(row)
    return rows


def _both(folder: Path, has_margins: bool) -> tuple[float, float]:
    """Body of a rank: (the loss here, TRL's)."""
    import trl

    rows, file, objective = _rows(has_margins), folder / "pairs.jsonl", Reward(center=CENTER)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    blueprint = make_blueprint(BASE, Topology(), BaseOptions(dtype="float64"), objective)
    model = load_blueprint(blueprint.with_adapter(lora_config(LORA, "test")), device="cpu", seed=3).eval()
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    pad = padding_token_id(tokenizer)
    set_padding(model, pad)
    save_adapter(model, folder / "adapter")
    batch = collate([*read_margins(str(file), tokenizer, max_length=64)], pad_token_id=pad, num_targets=1)
    with meshlora.lift(), torch.no_grad():
        ours = FORMULAS[Reward](objective, outputs_of(model, batch), batch, None)[0].mean()
    base = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1, dtype=torch.float64)
    args = trl.RewardConfig(
        str(folder), center_rewards_coefficient=CENTER, max_length=64, report_to=[], use_cpu=True, bf16=False
    )
    given = {"args": args, "train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    trainer = trl.RewardTrainer(model=PeftModel.from_pretrained(base, str(folder / "adapter")), **given)
    inputs = trainer.data_collator([*trainer.train_dataset])
    with meshlora.lift(), torch.no_grad():
        theirs = trainer.compute_loss(trainer.model, inputs)
    return float(ours), float(theirs)


@pytest.mark.parametrize("has_margins", [True, False], ids=["margins", "none"])
def test_the_loss_of_a_reward_model_is_that_of_trl(
    has_margins: bool, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    ((ours, theirs),) = pools(1).run(_both, tmp_path, has_margins)
    assert ours == pytest.approx(theirs, rel=1e-12)
