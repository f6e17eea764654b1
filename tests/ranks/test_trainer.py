"""`meshlora train` from file to adapter, against transformers + peft on one process and across topologies."""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from meshlora.run.config.file import read_run
from meshlora.run.run import train
from meshlora.run.together import prepare_run
from meshlora.train.collation import collate
from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from tests.one_process import train_alone
from tests.pool import Pool, wait_for_all
from tests.run_files import TINY, copy_lines, copy_tokenizer, metrics_of, write_run_file

STEPS = 4


@functools.cache
def small_base() -> Path:
    """The first two layers of the embedded base: a run costs half."""
    base = Path(tempfile.mkdtemp(prefix="meshlora-base-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    config = AutoConfig.from_pretrained(TINY, num_hidden_layers=2)
    AutoModelForCausalLM.from_pretrained(TINY, config=config).save_pretrained(base)
    copy_tokenizer(base)
    return base


def run_file(folder: Path, name: str, topology: str, **changes: Any) -> Path:
    tree: dict[str, Any] = {
        "model": {"path": str(small_base()), "dtype": "float64"},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "data": {"eval": str(folder / "eval.jsonl"), "max_length": 128},
        "train": {
            "steps": STEPS,
            "batch_size": 7,  # neither dp nor micro_batch_size divides it: shares are unequal, one rank runs a dummy
            "micro_batch_size": 2,
            "lr": 5e-3,
            "warmup_steps": 2,
            "max_grad_norm": 0.1,
            "weight_decay": 0.01,
            "save_every": 2,
            "eval_every": 2,
        },
        "topology": topology,
    }
    for key, value in changes.items():
        group, _, leaf = key.partition("__")
        tree[group][leaf] = value
    return write_run_file(folder / f"{name}.yaml", **tree)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run files and a little data: 19 sequences, so that 4 steps of 7 cross an epoch with a short batch."""
    path = tmp_path_factory.mktemp("runs")
    for name, lines in (("train", 19), ("eval", 5)):
        copy_lines(name, path / f"{name}.jsonl", 0, lines)
    return path


def _train(file: Path, world: int, resume: str | None = None) -> None:
    run = prepare_run(read_run(file), world=world, resume=resume)
    if world > 1:  # elsewhere ranks meet in `join`, before the output folder is made; in a pool they have met already
        wait_for_all(world)
    train({"": run})


@pytest.fixture(scope="module")
def reference(folder: Path, pools: Callable[[int], Pool]) -> tuple[Path, list[float]]:
    """(adapter, losses) of the one-process run; it starts from what a tp=2 run saved as its initial adapter."""
    file = run_file(folder, "for-reference", "tp=2")
    pools(2).run(run_and_keep_groups, file, 2)
    losses = train_alone(file, initial=folder / "for-reference" / "initial", out=folder / "reference")
    return folder / "reference", losses


def run_and_keep_groups(file: Path, world: int, resume: str | None = None) -> None:
    """`train` closes the process group at its end; the pool needs it for the next test."""
    import meshlora.run.run as module

    module.leave = lambda: None
    _train(file, world, resume)


@pytest.mark.parametrize(
    ("topology", "world"),
    [
        ("", 1),
        pytest.param("tp=2,sp", 2, marks=pytest.mark.proof),
        pytest.param("dp=2", 2, marks=pytest.mark.proof),
        ("dp=2,tp=2,sp", 4),
        pytest.param("dp=4", 4, marks=pytest.mark.proof),
    ],
)
def test_run_gives_the_adapter_of_one_process(
    topology: str, world: int, folder: Path, reference: tuple[Path, list[float]], pools: Callable[[int], Pool]
) -> None:
    name = f"run-{topology or 'alone'}"
    file = run_file(folder, name, topology)
    if world == 1:
        _train(file, 1)
    else:
        pools(world).run(run_and_keep_groups, file, world)
    adapter, losses = reference
    assert compare_adapters(folder / name / "adapter", adapter).relative < 1e-6
    assert largest_loss_gap(read_losses(folder / name / "metrics.jsonl"), losses) < 1e-11


def test_everything_a_user_expects_lies_in_the_output_folder(folder: Path, reference: tuple[Path, list[float]]) -> None:
    output = folder / "for-reference"
    assert sorted(p.name for p in output.iterdir()) == ["adapter", "checkpoints", "initial", "metrics.jsonl"]
    assert sorted(p.name for p in (output / "checkpoints").iterdir()) == ["latest", "step-000002"]
    assert (output / "checkpoints" / "latest").resolve() == (output / "checkpoints" / "step-000002").resolve()
    lines = metrics_of(output)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert set(steps[0]) == {
        *("step", "steps", "loss", "lr", "grad_norm", "tokens", "step_time_s", "peak_memory_bytes")
    }
    assert [line["lr"] for line in steps] == pytest.approx([2.5e-3, 5e-3, 5e-3, 2.5e-3])
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [2, 4]
    assert [line["eval_perplexity"] for line in evaluated] == [math.exp(line["eval_loss"]) for line in evaluated]
    assert steps[2]["tokens"] < steps[0]["tokens"], "the third batch is the short end of the epoch"


def test_initial_adapter_is_the_identity_and_the_trained_one_is_not(
    folder: Path, reference: tuple[Path, list[float]]
) -> None:
    def largest_b(name: str) -> float:
        tensors = load_file(folder / "for-reference" / name / "adapter_model.safetensors")
        return max(float(t.abs().max()) for key, t in tensors.items() if "lora_B" in key)

    assert largest_b("initial") == 0.0
    assert largest_b("adapter") > 1e-4


def test_evaluation_is_the_mean_over_all_held_out_tokens(folder: Path, reference: tuple[Path, list[float]]) -> None:
    from meshlora_judge import reference as judge

    run = prepare_run(read_run(folder / "for-reference.yaml", ["train.overwrite=true"]))
    assert run.eval_data is not None
    base = AutoModelForCausalLM.from_pretrained(small_base(), dtype="float64")
    model = PeftModel.from_pretrained(base, str(folder / "for-reference" / "adapter"), is_trainable=True)
    batches = [
        judge.MicroBatch(b.input_ids, b.attention_mask, b.labels)
        for b in (collate([sequence], pad_token_id=0) for sequence in run.eval_data)
    ]
    lines = (folder / "for-reference" / "metrics.jsonl").read_text().splitlines()
    evaluated = [json.loads(line) for line in lines if "eval_loss" in line][-1]
    assert evaluated["eval_loss"] == pytest.approx(judge.accumulate(model, batches, run.config.train)[0], rel=1e-11)
    assert evaluated["eval_tokens"] == run.eval_data.num_trained_tokens


def test_going_on_from_an_adapter_starts_where_it_ended(
    folder: Path, reference: tuple[Path, list[float]], pools: Callable[[int], Pool]
) -> None:
    file = run_file(folder, "more", "tp=2,sp")
    tree = yaml.safe_load(file.read_text())
    del tree["lora"]
    file.write_text(yaml.safe_dump({**tree, "adapter": str(folder / "for-reference" / "adapter")}))
    pools(2).run(run_and_keep_groups, file, 2)
    assert (folder / "more" / "initial" / "adapter_model.safetensors").read_bytes() == (
        folder / "for-reference" / "adapter" / "adapter_model.safetensors"
    ).read_bytes()
