"""`meshlora rl` with a teacher: the student's own completions, what a teacher says of them, and the loss of GKD."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from meshlora.adapter.formats.peft_format import WEIGHTS_FILE
from meshlora.cli.main import main
from meshlora.reading.sampler import epoch_order
from meshlora.reading.stream import RolloutStream
from meshlora.run.config.file import read_run
from meshlora.run.texts import Texts
from meshlora.run.together import prepare_run
from meshlora.verify.alone import reference_run
from meshlora_extra.rl.rollouts import share_of
from meshlora_ground.errors import MeshloraError
from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from tests.extra.test_rl import STEPS, _run_stale, records_of, rl_file, run_rl
from tests.for_each import for_each
from tests.pool import Pool, RankError
from tests.ranks.test_distillation import _write_model, distill_file
from tests.ranks.test_trainer import run_and_keep_groups, small_base
from tests.run_files import metrics_of

OBJECTIVE = {"kind": "distill", "divergence": "jsd", "beta": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a teacher of other sizes in it."""
    found = tmp_path_factory.mktemp("taught")
    _write_model(found / "teacher", 2048)
    return found


def taught_file(folder: Path, name: str, topology: str, *, rl: dict[str, Any] | None = None, **train: Any) -> Path:
    """Four completions a step, of as many prompts, whose records have one, too."""
    objective = OBJECTIVE | {"teacher": str(folder / "teacher")} | train.pop("objective", {})
    own = {"rewards": [], "completions": 1, **(rl or {})}
    options = {"objective": objective, "batch_size": 4, "eval_every": 2, **train}
    file = rl_file(folder, name, topology, rl=own, **options)
    prompts = folder / "prompts.jsonl"
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    prompts.write_text("".join(json.dumps(row | {"completion": row["answer"]}) + "\n" for row in rows))
    tree = yaml.safe_load(file.read_text())
    tree["data"]["eval"] = str(prompts)
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.fixture(scope="module")
def made(folder: Path, pools: Callable[[int], Pool]) -> Path:
    """The output of a run on tp=2."""
    pools(2).run(run_rl, taught_file(folder, "made", "tp=2,sp"), 2)
    return folder / "made"


def _lines(output: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_of(output) if "loss" in line]


def _alone(file: Path, made: Path, out: Path) -> list[float]:
    """transformers and PEFT on one process, on what the run has generated; the losses."""
    config = read_run(file, ["train.overwrite=true"])
    every = out.with_suffix(".jsonl")
    every.write_text("".join(RolloutStream(made / "rollouts").file(step).read_text() for step in range(1, STEPS + 1)))
    run = prepare_run(config)
    texts = Texts(config.model, config.data, config.train.objective, "spoken")
    data = texts.read(str(every), texts.tokenizer(), run.blueprint.config)
    drawn = epoch_order(len(data), seed=config.train.seed, epoch=0)  # so that each step draws its own
    placed = dataclasses.replace(data.chosen(np.argsort(drawn)), columns={})
    return reference_run(config, placed, steps=STEPS, pad_token_id=run.pad_token_id, adapter=made / "initial", out=out)


def test_stages_make_the_completions_and_the_adapter_of_tp(
    made: Path, folder: Path, pools: Callable[[int], Pool]
) -> None:
    pools(2).run(run_rl, taught_file(folder, "staged", "pp=2"), 2)
    for step in range(1, STEPS + 1):
        ours, theirs = records_of(folder / "staged", step), records_of(made, step)
        assert [record["input_ids"] for record in ours] == [record["input_ids"] for record in theirs]
    assert [line["loss"] for line in _lines(folder / "staged")] == pytest.approx(
        [line["loss"] for line in _lines(made)], rel=1e-9
    )
    assert compare_adapters(folder / "staged" / "adapter", made / "adapter").relative < 1e-6


def test_adapter_is_that_of_one_process(made: Path, folder: Path) -> None:
    losses = _alone(taught_file(folder, "made", ""), made, folder / "alone")
    assert compare_adapters(made / "adapter", folder / "alone").relative < 1e-6
    assert largest_loss_gap(read_losses(made / "metrics.jsonl"), losses) < 1e-11


def test_loss_is_that_of_trl_on_the_same_completions(made: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    base = AutoModelForCausalLM.from_pretrained(small_base(), dtype="float64")
    student = PeftModel.from_pretrained(base, str(made / "initial"))
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype="float64")
    records = records_of(made, 1)
    longest = max(len(record["input_ids"]) for record in records)
    ids, labels = (torch.full((len(records), longest), value) for value in (0, -100))
    mask = torch.zeros_like(ids)
    for row, record in enumerate(records):
        own = torch.tensor(record["input_ids"])
        ids[row, : len(own)], mask[row, : len(own)] = own, 1
        labels[row, : len(own)] = own.where(torch.tensor(record["is_trained"]) == 1, -100)
    trainer: Any = SimpleNamespace(
        teacher_model=teacher, beta=OBJECTIVE["beta"], generalized_jsd_loss=GKDTrainer.generalized_jsd_loss
    )
    loss = GKDTrainer.compute_loss(trainer, student, {"input_ids": ids, "attention_mask": mask, "labels": labels})
    assert _lines(made)[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_completions_are_trained_and_not_their_prompts(made: Path) -> None:
    """In order: a prompt, then what was sampled, each of whose tokens has a log-probability."""
    for step in range(1, STEPS + 1):
        for record in records_of(made, step):
            number = sum(record["is_trained"])
            assert record["is_trained"] == [0] * (len(record["input_ids"]) - number) + [1] * number
            assert len(record["engine_log_probs"]) == number > 0
            assert "reward" not in record
        line = _lines(made)[step - 1]
        assert line["largest_engine_gap"] < 2e-6
        assert not {"ratio", "nll"} & line.keys()
    assert [line["step"] for line in metrics_of(made) if "eval_loss" in line] == [2, 4]


def test_a_student_that_generates_a_step_late_ends_the_run(folder: Path, pools: Callable[[int], Pool]) -> None:
    file = taught_file(folder, "stale", "dp=2", steps=3)
    with pytest.raises((MeshloraError, RankError), match="step 2: the log-probabilities of what was generated"):
        pools(2).run(_run_stale, file)


def test_a_share_of_the_steps_has_the_completions_of_the_data(folder: Path, pools: Callable[[int], Pool]) -> None:
    file = taught_file(folder, "mixed", "dp=2", rl={"on_policy": 0.5})
    pools(2).run(run_rl, file, 2)
    output, seed = folder / "mixed", read_run(file).train.seed
    is_own = [share_of(seed, step) < 0.5 for step in range(1, STEPS + 1)]
    assert len({*is_own}) == 2
    assert ["engine_log_probs" in records_of(output, step)[0] for step in range(1, STEPS + 1)] == is_own
    assert ["engine_gap" in line for line in _lines(output)] == is_own
    losses = _alone(taught_file(folder, "mixed", ""), output, folder / "mixed-alone")
    assert compare_adapters(output / "adapter", folder / "mixed-alone").relative < 1e-6
    assert largest_loss_gap(read_losses(output / "metrics.jsonl"), losses) < 1e-11


def test_a_run_that_goes_on_ends_with_the_same_bytes(made: Path, folder: Path, pools: Callable[[int], Pool]) -> None:
    """After two of four steps, whose later rollouts are made again."""
    output = folder / "again"
    shutil.copytree(made, output, symlinks=True)
    shutil.rmtree(output / "adapter")
    shutil.rmtree(output / "checkpoints" / "step-000003")
    for step in (3, 4):
        RolloutStream(output / "rollouts").file(step).unlink()
    pools(2).run(run_rl, taught_file(folder, "again", "tp=2,sp"), 2, "auto")
    assert [records_of(output, step) for step in (3, 4)] == [records_of(made, step) for step in (3, 4)]
    assert (output / "adapter" / WEIGHTS_FILE).read_bytes() == (made / "adapter" / WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize("context", [None, "Be brief."])
def test_a_distilling_run_of_the_data_goes_on(
    context: str | None, folder: Path, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    """With a second model, and with itself in a context: to the bytes of a run that was not stopped."""
    objective: dict[str, Any] = {"kind": "distill", "teacher": str(folder / "teacher")}
    if context is not None:
        objective = {"kind": "distill", "teacher": "itself", "context": context}
    changes = {"train__objective": objective, "train__save_every": 1}
    whole = distill_file(tmp_path, "whole", "tp=2,sp", **changes)
    pools(2).run(run_and_keep_groups, whole, 2)
    shutil.copytree(tmp_path / "whole", tmp_path / "again", symlinks=True)
    shutil.rmtree(tmp_path / "again" / "adapter")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-000002")
    again = distill_file(tmp_path, "again", "tp=2,sp", **changes)
    pools(2).run(run_and_keep_groups, again, 2, "auto")
    found = [(tmp_path / name / "adapter" / WEIGHTS_FILE).read_bytes() for name in ("whole", "again")]
    assert found[0] == found[1]


@for_each(
    ("changes", "words"),
    [
        ({"rl.rewards": "[{kind: regex, pattern: a}]"}, "the teacher alone says what a completion is worth"),
        ({"train.objective.teacher": "recorded"}, "its teacher is one that reads what is generated"),
        (
            {"train.objective.teacher": "itself", "train.objective.context": "Be brief."},
            "its teacher is one that reads what is generated",
        ),
        ({"rl.on_policy": "0.5", "rl.completions": "2"}, "a prompt has one completion in the data"),
        ({"rl.on_policy": "1.5"}, "rl.on_policy=1.5: it must be in [0, 1]"),
        ({"train.objective": "{kind: dpo}"}, "it learns from rewards in groups, or from a teacher"),
        ({"train.objective": "{kind: grpo}", "rl.on_policy": "0.5"}, "rl.rewards=[]: it must be one or more"),
    ],
)
def test_what_does_not_fit_is_said_before_the_run(
    changes: dict[str, str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = taught_file(folder, "wrong", "")
    overrides = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    assert main(["rl", str(file), "--nproc", "1", *overrides]) == 2
    assert words in capsys.readouterr().err


def test_a_prompt_without_a_completion_is_refused_where_some_steps_train_on_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = taught_file(folder, "lacking", "", rl={"on_policy": 0.5})
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    del rows[2]["completion"]
    lacking = folder / "lacking.jsonl"
    lacking.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["rl", str(file), "--nproc", "1", "--set", f"data.train={lacking}"]) == 2
    assert "lacking.jsonl:3: it has no completion" in capsys.readouterr().err
