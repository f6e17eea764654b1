"""`train.cuda_graphs` on a GPU: real records. What a CPU shows of them: `tests/ranks/test_graphs.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshlora.run.graphs.recorder import CudaRecorder, Run
from meshlora_judge.compare import largest_loss_gap, read_losses
from tests.ranks.test_trainer import _train
from tests.run_files import copy_lines, write_run_file

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[records, replays]."""
    found, record = [0, 0], CudaRecorder.record

    def counting(recorder: CudaRecorder, run: Run) -> Run:
        replay = record(recorder, run)
        found[0] += 1

        def count() -> None:
            found[1] += 1
            replay()

        return count

    monkeypatch.setattr(CudaRecorder, "record", counting)
    return found


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("packing", [False, "auto", True])
def test_replayed_steps_are_the_eager_ones(
    dtype: str, limit: float, packing: Any, tmp_path: Path, counted: list[int]
) -> None:
    """The first replay of each record has compared all gradients. Joined rows have a kernel for records in bfloat16
    alone: in float32 `auto` runs on without."""
    copy_lines("train", tmp_path / "train.jsonl", 0, 19)
    losses = {}
    for wanted in ("off", "auto"):
        options = {"steps": 12, "batch_size": 7, "micro_batch_size": 2, "cuda_graphs": wanted}
        file = write_run_file(
            tmp_path / f"{wanted}.yaml",
            model={"dtype": dtype},
            data={"packing": packing},
            train=options,
            topology="",
            device="cuda",
        )
        _train(file, 1)
        losses[wanted] = read_losses(tmp_path / wanted / "metrics.jsonl")
    assert largest_loss_gap(losses["auto"], losses["off"]) < limit
    records, replays = counted
    if dtype == "bfloat16" or packing is False:
        assert records
        assert replays > records
