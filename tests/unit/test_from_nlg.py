"""`meshlora from-nlg`: the command of microsoft/LoRA's README becomes its recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from transformers import AutoTokenizer

from meshlora.cli.main import main
from meshlora.run.config.file import read_run
from tests.run_files import TINY
from tests.same_sequences import assert_same_sequences
from tests.unit.mistakes import one_error

LINE = """--train_data train.jsonl --valid_data valid.jsonl --train_batch_size 8 --grad_acc 1 --valid_batch_size 4
    --seq_len 512 --model_card gpt2.md --init_checkpoint gpt2-medium-pytorch_model.bin --platform local --clip 0.0
    --lr 0.0002 --weight_decay 0.01 --correct_bias --adam_beta2 0.999 --scheduler linear --warmup_step 500 --max_epoch 5
    --save_interval 1000 --lora_dim 4 --lora_alpha 32 --lora_dropout 0.1 --label_smooth 0.1 --work_dir e2e
    --random_seed 110 --local_rank=0"""
README = LINE.split()


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """`--local_rank` becomes a variable of the process."""
    with mock.patch.dict(os.environ):
        yield


def test_command_of_the_readme_is_the_preset(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Data that are encoded already are complete; what is evaluated as text is joined as they are."""
    file = tmp_path / "run.yaml"
    assert main(["from-nlg", "--model", str(tmp_path), "--out", str(file), *README]) == 0
    assert f"meshlora train {file}\n" in capfd.readouterr().out
    found = read_run(str(file), [])
    (tmp_path / "preset.yaml").write_text(
        f"preset: microsoft-e2e\nmodel: {{path: '{tmp_path}'}}\n"
        "data: {train: train.jsonl, eval: valid.jsonl}\n"
        "train: {output: e2e, micro_batch_size: 8, seed: 110, log_every: 100, save_every: 1000, eval_every: 2000}\n"
    )
    meant = read_run(str(tmp_path / "preset.yaml"), [])
    assert (found.train, found.lora, found.data, found.model) == (meant.train, meant.lora, meant.data, meant.model)
    assert found.generate == meant.generate


def test_ranks_and_accumulation_are_in_the_batch_and_steps_are_optimizer_steps(tmp_path: Path) -> None:
    words = [*README, "--grad_acc", "4", "--max_step", "400", "--nproc", "2", "--obj", "jlm"]
    assert main(["from-nlg", "--model", str(tmp_path), "--out", str(tmp_path / "run.yaml"), *words]) == 0
    found = read_run(str(tmp_path / "run.yaml"), [])
    assert (found.train.batch_size, found.train.micro_batch_size, found.topology) == (64, 8, "dp=2")
    assert (found.train.steps, found.train.warmup_steps, found.train.save_every) == (100, 125, 250)
    assert found.data.train_on == "everything"


@pytest.mark.parametrize("scheduler", ["cosine", "cycle"])
def test_schedules_are_theirs(scheduler: str, tmp_path: Path) -> None:
    words = [*README, "--scheduler", scheduler, "--i_steps", "0,10,30", "--i_lrs", "1e-4,1e-3,0"]
    assert main(["from-nlg", "--model", str(tmp_path), "--out", str(tmp_path / "run.yaml"), *words]) == 0
    train = read_run(str(tmp_path / "run.yaml"), []).train
    assert train.schedule == {"cosine": "cosine_of_run", "cycle": "cycle"}[scheduler]
    if scheduler == "cycle":
        assert (train.cycle, train.steps, train.warmup_steps) == ({0: 1e-4, 10: 1e-3, 30: 0.0}, 30, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fp16"], "--fp16"),
        (["--scheduler", "inv_sqrt"], "a constant rate without a warm-up"),
        (["--lora_dim", "0"], "--lora_dim 0"),
        (["--grad_acc", "3"], "--grad_acc 3"),
        (["--scheduler", "cycle", "--i_steps", "0,1"], "--i_steps 0,1"),
        (["--lr", "-1"], "train.lr=-1.0"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    words: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["from-nlg", "--model", str(tmp_path), "--out", str(tmp_path / "run.yaml"), *README, *words]
    assert main(line) == 2
    assert said in one_error(*capfd.readouterr())
    assert not (tmp_path / "run.yaml").exists()


def test_uncorrected_adam_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [word for word in README if word != "--correct_bias"]
    assert main(["from-nlg", "--model", str(tmp_path), "--out", str(tmp_path / "run.yaml"), *words]) == 2
    assert "without --correct_bias" in one_error(*capfd.readouterr())


ROWS = [("name : Aromi | food : Thai", "Aromi is Thai."), ("name : Strada", "A place named Strada.")]


@pytest.mark.parametrize("is_separated", [True, False])
def test_text_that_is_evaluated_has_the_sequences_of_the_encoded_data_of_the_run(
    is_separated: bool, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    end, encoded, texts = [tokenizer.eos_token_id], [], []
    for context, completion in ROWS:
        own = tokenizer(context).input_ids + (end if is_separated else [])
        encoded.append({"context": own, "completion": tokenizer(f" {completion}").input_ids + end})
        texts.append({"context": context, "completion": completion})
    for name, rows in {"train": encoded, "test_formatted": texts}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file, words = tmp_path / "run.yaml", [*README, "--train_data", str(tmp_path / "train.jsonl")]
    assert main(["from-nlg", "--model", str(TINY), "--out", str(file), *words]) == 0
    assert_same_sequences(file, tmp_path / "train.jsonl", tmp_path / "test_formatted.jsonl")
