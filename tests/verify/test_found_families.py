"""Families that no table has: found, proved and trained by the commands alone, in processes without any table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from tests.run_files import TINY, copy_tokenizer, metrics_of, write_run_file

HIDDEN = Path(__file__).parents[1] / "hidden_tables"
# Separate and fused matrices in several orders, arguments and parameters of heads, wide norms, low rank, experts.
DRILL = ("stablelm", "gpt2", "phi3", "olmo2", "bloom", "gpt_oss", "deepseek_v3", "opt", "qwen3_moe", "cohere")
# That came with later minors of transformers than the first that meshlora knew: those that the installed one has. All
# but the first came after the pinned one: `make test-newest` runs these.
LATER = ("hy_v4", "exaone", "sarvam_mla", "sarvam_moe", "hy_v4_vl", "lara_mini")
LATER = tuple(name for name in LATER if name in CONFIG_MAPPING)


def _run(*words: str, cache: Path) -> str:
    """What a command says, in a process without tables."""
    paths = [str(HIDDEN), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MESHLORA_CACHE": str(cache)}
    command = [sys.executable, "-m", "meshlora", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("family", DRILL)
def test_hidden_family_is_found_and_proved(family: str, tmp_path: Path) -> None:
    said = _run("verify", "--family", family, "--topology", "tp=2", "--topology", "tp=2,sp", cache=tmp_path)
    assert f"no table has a plan of model_type '{family}'; found: " in said
    assert "proved in" in said


@pytest.mark.long
@pytest.mark.parametrize("family", LATER)
def test_family_that_came_later_is_found_and_proved(family: str, tmp_path: Path) -> None:
    said = _run("verify", "--family", family, "--topology", "tp=2", "--topology", "tp=2,sp", cache=tmp_path)
    assert "proved in" in said


@pytest.mark.long
@pytest.mark.parametrize("family", LATER)
def test_family_that_came_later_is_trained(family: str, tmp_path: Path) -> None:
    run_file = _run_file(tmp_path, family)
    said = _run("train", str(run_file), "--nproc", "2", cache=tmp_path / "cache")
    assert f"preflight: {family} on tp=2,sp proved in" in said
    assert len(metrics_of(run_file.with_suffix(""))) == 1


def _run_file(folder: Path, family: str) -> Path:
    vocab_size = json.loads((TINY / "config.json").read_text())["vocab_size"]
    config = twin_config(family, tp=2)
    config.get_text_config().vocab_size = vocab_size
    write_twin(config, folder / "model", dtype=torch.float32, seed=0)
    copy_tokenizer(folder / "model")
    (folder / "train.jsonl").write_text('{"prompt": "def f(x):", "completion": " return x"}\n' * 4)
    return write_run_file(
        folder / "run.yaml",
        model={"path": str(folder / "model"), "dtype": "float32"},
        data={"max_length": 32},
        lora={"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        train={"steps": 1, "batch_size": 2, "micro_batch_size": 1},
        topology="tp=2,sp",
        device="cpu",
    )


@pytest.mark.long
@pytest.mark.parametrize("family", ["stablelm", "gpt2", "opt"])
def test_hidden_family_is_trained(family: str, tmp_path: Path) -> None:
    run_file = _run_file(tmp_path, family)
    said = _run("train", str(run_file), "--nproc", "2", cache=tmp_path / "cache")
    assert f"no table has a plan of model_type '{family}'; found: " in said
    assert f"preflight: {family} on tp=2,sp proved in" in said
    assert len(metrics_of(run_file.with_suffix(""))) == 1


@pytest.mark.long
def test_hidden_family_is_found_saved_and_taken_back(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    words = ("verify", "--family", "stablelm", "--topology", "tp=2,sp", "--steps", "1")
    said = _run(*words, "--save", str(plan), cache=tmp_path / "cache")
    assert f"plan: {plan}" in said
    assert "self_attn.q_proj: column" in plan.read_text()
    assert "proved in" in _run(*words, "--plan", str(plan), cache=tmp_path / "other")
