"""`meshlora evaluate` on a mesh: each sequence once, however they divide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshlora.config.file import read_run
from meshlora.config.run import RunConfig
from meshlora.train.evaluate import evaluate, prepare_evaluation
from tests.pool import Pool

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file with 5 held-out sequences of unequal lengths."""
    folder = tmp_path_factory.mktemp("evaluate")
    lines = (EXAMPLES / "docstrings" / "eval.jsonl").read_text().splitlines()[:5]
    (folder / "eval.jsonl").write_text("\n".join(lines) + "\n")
    tree = {
        "model": {"path": str(EXAMPLES / "tiny_base"), "dtype": "float64"},
        "lora": {"r": 4},
        "data": {"train": "unread", "eval": str(folder / "eval.jsonl"), "max_length": 128},
        "train": {"output": str(folder / "out"), "steps": 1, "batch_size": 4, "micro_batch_size": 2},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


def _evaluate(config: RunConfig, world: int) -> dict[str, Any]:
    return evaluate(prepare_evaluation(config, adapter=None, world=world))


@pytest.mark.parametrize("topology", ["dp=2", "tp=2,sp"])
def test_loss_does_not_depend_on_the_topology(topology: str, file: Path, pools: Callable[[int], Pool]) -> None:
    alone = _evaluate(read_run(file), 1)
    assert alone["examples"] == 5
    for found in pools(2).run(_evaluate, read_run(file, [f"topology={topology}"]), 2):
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-12)
        assert found["trained_tokens"] == alone["trained_tokens"]
