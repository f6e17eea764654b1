"""A run with packed rows, from file to adapter, is the run without: loss, gradient, evaluation, routing record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora.train.packing import packed_rows
from meshlora.wings.experts.routing import step_file
from meshlora_ground.routing import RoutingRecord
from meshlora_judge.compare import compare_adapters
from tests.pool import Pool
from tests.ranks import test_trainer as dense
from tests.ranks import test_training_experts as experts
from tests.ranks.test_trainer import folder, run_and_keep_groups
from tests.run_files import metrics_of

__all__ = ["folder"]  # a fixture
expert_folder = experts.folder


def _assert_same_run(ours: Path, theirs: Path) -> None:
    assert compare_adapters(ours / "adapter", theirs / "adapter").relative < 1e-6
    for one, other in zip(metrics_of(ours), metrics_of(theirs), strict=True):
        assert one.keys() == other.keys()
        limit = 1e-11 if other["step"] == 1 else 1e-6  # then AdamW has divided by tiny moments
        for name in one.keys() - {"step_time_s", "peak_memory_bytes"}:
            assert one[name] == pytest.approx(other[name], rel=limit), name


@pytest.fixture(scope="module")
def unpacked(folder: Path, pools: Callable[[int], Pool]) -> Path:
    pools(1).run(run_and_keep_groups, dense.run_file(folder, "unpacked", ""), 1)
    return folder / "unpacked"


@pytest.mark.long
@pytest.mark.parametrize(("topology", "recompute"), [("", "none"), ("dp=2", "none"), ("tp=2,sp", "full")])
def test_packed_run_is_the_run_one_sequence_a_row(
    topology: str, recompute: str, folder: Path, unpacked: Path, pools: Callable[[int], Pool]
) -> None:
    name, world = f"packed-{topology}", 2 if topology else 1
    options = {"data__packing": True, "train__recompute": recompute, "train__micro_batch_size": 1}
    file = dense.run_file(folder, name, topology, **options)
    pools(world).run(run_and_keep_groups, file, world)
    _assert_same_run(folder / name, unpacked)


def test_rows_hold_several_sequences(folder: Path) -> None:
    """What the runs above compare: fewer rows than sequences, and positions that begin again."""
    run = prepare_run(read_run(dense.run_file(folder, "rows", "", data__packing=True)))
    lengths = [len(run.train_data[int(i)].input_ids) for i in run.batches.batch(0)]
    (rows,) = packed_rows(lengths, 1, run.config.data.max_length)
    assert sum(map(len, rows)) == 7
    assert len(rows) < 7


@pytest.mark.long
def test_numbers_of_tokens_in_a_record_do_not_depend_on_packing(
    expert_folder: Path, pools: Callable[[int], Pool]
) -> None:
    """Recorded in packed rows on two meshes and without; with load balancing, which counts real tokens."""
    words = (expert_folder / "train.jsonl").read_text().split()
    short = expert_folder / "short.jsonl"
    texts = [" ".join(words[20 * number : 20 * number + 2 + number]) for number in range(9)]
    short.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options: dict[str, Any] = {"router_aux_loss_coef": 1.0, "steps": 2}
    for name, mesh in (("plain", "dp=1"), ("dp", "dp=2,ep=2"), ("tp", "tp=2,sp,ep=2")):
        data = {"train": str(short), "packing": name != "plain"}
        record = {"routing_record": str(expert_folder / f"routes-{name}")}
        experts._run(pools, expert_folder, name, mesh, data=data, **options, **record)
    experts._run(pools, expert_folder, "unrecorded", "dp=1", data={**data, "packing": False}, **options)
    _assert_same_run(expert_folder / "plain", expert_folder / "unrecorded")
    for name in ("dp", "tp"):
        _assert_same_run(expert_folder / name, expert_folder / "plain")
        for step in range(2):
            ours, theirs = (
                RoutingRecord.load(step_file(expert_folder / f"routes-{where}", step)) for where in (name, "plain")
            )
            assert ours.choices.keys() == theirs.choices.keys()
            assert all(torch.equal(ours.choices[key], table) for key, table in theirs.choices.items())
