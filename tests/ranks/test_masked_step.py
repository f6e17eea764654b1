"""A step whose rollouts are all truncated, and masked: of loss 0 and no gradient, as in TRL, on every mesh."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshlora.reading.sampler import epoch_order
from meshlora.run.config.file import read_run
from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from tests.one_process import train_alone
from tests.pool import Pool
from tests.ranks.test_trainer import run_and_keep_groups, run_file
from tests.run_files import metrics_of

SIZE, STEPS, EMPTY = 4, 3, 1  # of a step; how many; which, from 0, has nothing to train


def _rollout(place: int, *, truncated: bool) -> dict[str, Any]:
    ids = [11 + place, 5, 7 + place, 9]
    rest = {"reward": place % 3, "group": place // 2, "truncated": truncated}
    return {"input_ids": ids, "is_trained": [0, 0, 1, 1], **rest}


@pytest.mark.parametrize("topology", ["dp=2", "tp=2,sp"])
def test_a_step_of_masked_rollouts_has_no_loss(topology: str, tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    objective = {"kind": "grpo", "mask_truncated": True}
    data = tmp_path / "rollouts.jsonl"
    options = {"train__objective": objective, "train__steps": STEPS, "train__batch_size": SIZE, "train__epochs": None}
    options |= {"train__eval_every": 0, "train__save_every": 0, "data__eval": None, "data__train": str(data)}
    data.write_text("{}")
    file = run_file(tmp_path, "run", topology, **options)
    order = epoch_order(SIZE * STEPS, seed=read_run(file).train.seed, epoch=0)
    masked = order[EMPTY * SIZE : (EMPTY + 1) * SIZE].tolist()
    rows = [_rollout(place, truncated=place in masked) for place in range(len(order))]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pools(2).run(run_and_keep_groups, file, 2)
    output = tmp_path / "run"
    losses = train_alone(file, initial=output / "initial", out=tmp_path / "alone")
    lines = metrics_of(output)
    assert [line["tokens"] == 0 for line in lines] == [False, True, False]
    assert lines[EMPTY]["loss"] == losses[EMPTY] == lines[EMPTY]["grad_norm"] == 0
    assert compare_adapters(output / "adapter", tmp_path / "alone").relative < 1e-6
    assert largest_loss_gap(read_losses(output / "metrics.jsonl"), losses) < 1e-11
