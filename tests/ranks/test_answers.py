"""Metrics on generated answers in a run: the same on every mesh, from rank 0's words, and followed by the run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshlora.adapter.formats.peft_format import WEIGHTS_FILE
from meshlora.run import trained
from meshlora.run.answers import measured_by_rank_0
from meshlora.run.checkpoint.manifest import read_whole
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora_ground.errors import UserError
from meshlora_ground.float64 import lift
from tests.pool import Pool
from tests.ranks.test_trainer import run_and_keep_groups, small_base
from tests.run_files import metrics_of, write_run_file

ROWS = [{"prompt": f"def f{n}(", "completion": f'{{"a": {n}}}'} for n in range(5)]
METRICS = ["exact_match", "json_match", {"regex": r'^\{"a": \d+\}$', "name": "form"}]
# Counts its calls, by process.
MINE = """\
import os, pathlib

def near(prompt, answer, reference):
    with (pathlib.Path(__file__).parent / "calls").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    assert prompt.startswith("def f"), prompt
    return len(os.path.commonprefix([answer, reference])) / len(reference)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def file_of(folder: Path, name: str, topology: str = "", **changes: Any) -> Path:
    """A run that learns `ROWS` by heart, with all metrics."""
    train = {"steps": 9, "batch_size": 5, "micro_batch_size": 2, "lr": 1e-2, "schedule": "constant", "eval_every": 3}
    generate = {"max_new_tokens": 10, "batch_size": 2, "metrics": [*METRICS, f"{folder / 'mine.py'}:near"]}
    return write_run_file(
        folder / f"{name}.yaml",
        model={"path": str(small_base()), "dtype": "float64"},
        lora={"r": 8, "target_modules": "all-linear"},
        data={"eval": str(folder / "train.jsonl")},
        train=train | changes.pop("train", {}),
        generate=generate | changes.pop("generate", {}),
        topology=topology,
        **changes,
    )


def measured(output: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics of its evaluation."""
    found = {}
    for line in metrics_of(output):
        if "eval_answers" in line:
            assert line["eval_answers"] == 5
            found[line["step"]] = {name: line[f"eval_{name}"] for name in ("exact_match", "json_match", "form", "near")}
    return found


@pytest.fixture
def alone(folder: Path) -> dict[int, dict[str, float]]:
    run_and_keep_groups(file_of(folder, "alone"), 1)
    return measured(folder / "alone")


def test_metrics_are_those_of_transformers_and_peft_and_change_no_step(
    folder: Path, alone: dict[int, dict[str, float]]
) -> None:
    assert [*alone] == [0, 3, 6, 9]
    assert alone[0]["exact_match"] == alone[0]["form"] == 0, "the base"
    assert 1 > alone[9]["near"] > alone[9]["exact_match"] > 0, "no metric says what another says"
    tokenizer = AutoTokenizer.from_pretrained(small_base())
    base = AutoModelForCausalLM.from_pretrained(small_base(), dtype=torch.float64)
    model = PeftModel.from_pretrained(base, folder / "alone" / "adapter").double().eval()
    said = []
    for row in ROWS:
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        with lift():
            tokens = model.generate(input_ids=ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
        said.append(tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True))
    wanted = [row["completion"] for row in ROWS]
    assert alone[9]["exact_match"] == sum(map(str.__eq__, map(str.strip, said), wanted)) / 5
    near = [max(n for n in range(len(of) + 1) if text[:n] == of[:n]) for text, of in zip(said, wanted, strict=True)]
    assert alone[9]["near"] == pytest.approx(sum(near) / len(wanted[0]) / 5, rel=1e-12)
    run_and_keep_groups(file_of(folder, "plain", generate={"metrics": []}), 1)
    assert measured(folder / "plain") == {}
    adapters = [(folder / name / "adapter" / WEIGHTS_FILE).read_bytes() for name in ("alone", "plain")]
    assert adapters[0] == adapters[1]
    card = (folder / "alone" / "adapter" / "README.md").read_text()
    shown = f"exact_match {alone[9]['exact_match']:.4g} (0 of the base)"
    assert shown in card
    assert "over 5 generated answers" in card
    kept = [read_whole(folder / name / "adapter", kinds=("adapter",)).identity for name in ("alone", "plain")]
    assert kept[0].keys() - kept[1].keys() == {"generate.metrics"}, "the hash of the function's file"


@pytest.mark.parametrize("topology", ["tp=2,sp", "dp=2", "pp=2"])
def test_metrics_are_equal_on_every_mesh_and_rank_0_alone_runs_the_function(
    topology: str, folder: Path, alone: dict[int, dict[str, float]], pools: Callable[[int], Pool]
) -> None:
    (folder / "calls").unlink()
    pools(2).run(run_and_keep_groups, file_of(folder, "two", topology), 2)
    assert measured(folder / "two") == alone
    calls = (folder / "calls").read_text().split()
    assert (len(calls), len({*calls})) == (4 * 5, 1)


def _error(file: Path, world: int) -> str:
    with pytest.raises(UserError) as raised:
        run_and_keep_groups(file, world)
    return str(raised.value)


def test_a_function_that_fails_ends_all_ranks_with_the_row(folder: Path, pools: Callable[[int], Pool]) -> None:
    code = "def near(prompt, answer, reference):\n    assert '3' not in reference, 'no threes'\n    return True\n"
    (folder / "mine.py").write_text(code)
    file = file_of(folder, "fails", "dp=2")
    said = pools(2).run(_error, file, 2, timeout_s=60)
    assert said[0] == said[1]
    assert f"{folder / 'train.jsonl'}:4: it raised AssertionError (no threes)" in said[0]


# --- what a run does by them ------------------------------------------------------------------------------------------

SCORES = [0.0, 0.2, 0.6, 0.6, 0.4, 0.9, 1.0]  # by step


def _run_with_scores(file: Path, world: int, resume: str | None = None) -> None:
    """Each rank has answers of its own; of rank 1 they only fall."""
    evaluate = trained.TrainedAdapter._report_evaluation

    def scored(self: Any, step: int) -> float | None:
        loss = evaluate(self, step)
        self.scores = {"exact_match": SCORES[step] if self.mesh.rank == 0 else 1.0 - step}
        return loss

    def noted(model: Any, measures: Any, prompts: Any, texts: Any) -> dict[str, float]:
        return {"exact_match": SCORES[NOW[0]]}

    NOW = [0]
    given = trained.TrainedAdapter.between

    def between(self: Any, done: int) -> None:
        NOW[0] = done
        given(self, done)

    import meshlora.run.answers as module

    trained.TrainedAdapter._report_evaluation = scored  # type: ignore[method-assign]
    trained.TrainedAdapter.between = between  # type: ignore[method-assign]
    module.measured_by_rank_0 = noted
    try:
        run_and_keep_groups(file, world, resume)
    finally:
        trained.TrainedAdapter._report_evaluation = evaluate  # type: ignore[method-assign]
        trained.TrainedAdapter.between = given  # type: ignore[method-assign]
        module.measured_by_rank_0 = measured_by_rank_0


def _watching(folder: Path, name: str, *, topology: str = "", **options: Any) -> Path:
    generate = {"metrics": ["exact_match"], "max_new_tokens": 1, "limit": 1}
    stopping = {"metric": "exact_match", **options.pop("early_stopping", {})}
    train = {"steps": 6, "eval_every": 1, "save_every": 1, "early_stopping": stopping, **options}
    return file_of(folder, name, topology, train=train, generate=generate)


def test_a_run_ends_when_the_metric_rises_no_more(folder: Path, pools: Callable[[int], Pool]) -> None:
    """More is better, as rank 0 sees it."""
    file = _watching(folder, "stops", topology="dp=2", early_stopping={"patience": 2})
    pools(2).run(_run_with_scores, file, 2)
    assert read_whole(folder / "stops" / "adapter", kinds=("adapter",)).step == 4
    numbers = {line["eval_answers"] for line in metrics_of(folder / "stops") if "eval_answers" in line}
    assert numbers == {1}, "generate.limit"
    assert prepare_run(read_run(file), world=2, resume="auto").is_finished


def test_a_resumed_run_counts_on_and_knows_its_best(folder: Path) -> None:
    """Stopped after step 3, whose answers were the best; step 4 is the second in a row without an improvement."""
    options: dict[str, Any] = {"early_stopping": {"patience": 2}, "keep_best": True}
    _run_with_scores(_watching(folder, "resumed", **options), 1)
    output = folder / "resumed"
    for name in ("adapter", "checkpoints/step-000004"):
        (output / name).rename(folder / name.replace("/", "-"))
    assert os.readlink(output / "checkpoints" / "best") == "step-000002"
    (output / "checkpoints" / "latest").unlink()
    card = (folder / "adapter" / "README.md").read_text()
    _run_with_scores(_watching(folder, "resumed", **options), 1, "auto")
    assert read_whole(output / "adapter", kinds=("adapter",)).step == 4
    assert "exact_match 0.4 (0 of the base)" in card
    assert (output / "adapter" / "README.md").read_text() == card
    assert os.readlink(output / "checkpoints" / "best") == "step-000002"


def test_the_best_checkpoint_is_the_one_with_the_best_answers(folder: Path) -> None:
    _run_with_scores(_watching(folder, "best", keep_best=True, keep_last=1, save_every=0, steps=4), 1)
    losses = [line["eval_loss"] for line in metrics_of(folder / "best") if "eval_loss" in line]
    assert losses[-1] == min(losses), "by the loss it would be the last"
    assert os.readlink(folder / "best" / "checkpoints" / "best") == "step-000002"
