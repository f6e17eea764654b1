"""`meshlora evaluate` on a mesh: each sequence once, however they divide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshlora.config.file import read_run
from meshlora.config.run import RunConfig
from meshlora.train.evaluate import evaluate, prepare_evaluation
from tests.pool import Pool
from tests.run_files import copy_lines, write_run_file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file with 5 held-out sequences of unequal lengths."""
    folder = tmp_path_factory.mktemp("evaluate")
    copy_lines("eval", folder / "eval.jsonl", 0, 5)
    data = {"train": "unread", "eval": str(folder / "eval.jsonl"), "max_length": 128}
    return write_run_file(folder / "out.yaml", model={"dtype": "float64"}, data=data, train={"micro_batch_size": 2})


def _evaluate(config: RunConfig, world: int) -> dict[str, Any]:
    return evaluate(prepare_evaluation(config, adapter=None, world=world))


@pytest.mark.parametrize("topology", ["dp=2", "tp=2,sp"])
def test_loss_does_not_depend_on_the_topology(topology: str, file: Path, pools: Callable[[int], Pool]) -> None:
    alone = _evaluate(read_run(file), 1)
    assert alone["examples"] == 5
    for found in pools(2).run(_evaluate, read_run(file, [f"topology={topology}"]), 2):
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-12)
        assert found["trained_tokens"] == alone["trained_tokens"]
