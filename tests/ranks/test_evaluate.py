"""`meshlora evaluate` on a mesh: each sequence once, however they divide."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshlora.run.answers import answered
from meshlora.run.config.file import read_run
from meshlora.run.config.run_file import RunConfig
from meshlora.run.evaluate import evaluate, load_to_generate, prepare_evaluation, prepare_prompts
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


def _generated(config: RunConfig, world: int) -> list[str]:
    run = prepare_evaluation(config, adapter=None, world=world)
    return answered(load_to_generate(run), prepare_prompts(run), config.generate)


@pytest.mark.long
@pytest.mark.parametrize("search", ["gpt2_beam", "transformers"])
def test_texts_of_several_ranks_are_those_of_one(
    search: str, tmp_path: Path, file: Path, pools: Callable[[int], Pool]
) -> None:
    """Five prompts in batches of two: the ranks have two batches and one, of which the last is short."""
    rows = [{"prompt": f"def f{n}(" + "a, " * n, "completion": " x"} for n in range(5)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"data.eval={tmp_path / 'eval.jsonl'}", "generate.max_new_tokens=8", "generate.batch_size=2"]
    words += ["generate.num_beams=3", f"generate.search={search}"]
    words += ["generate.no_repeat_ngram_size=2"]
    alone = _generated(read_run(file, words), 1)
    assert len(set(alone)) > 2, alone
    for topology in ("tp=2,sp", "pp=2"):
        for found in pools(2).run(_generated, read_run(file, [*words, f"topology={topology}"]), 2):
            assert found == alone, topology


def test_what_is_drawn_does_not_depend_on_the_number_of_ranks(file: Path, pools: Callable[[int], Pool]) -> None:
    words = ["generate.do_sample=true", "generate.max_new_tokens=4", "generate.batch_size=1", "data.eval_limit=3"]
    alone = _generated(read_run(file, words), 1)
    for found in pools(2).run(_generated, read_run(file, [*words, "topology=dp=2"]), 2):
        assert found == alone
