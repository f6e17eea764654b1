"""The judge stands alone: nothing of the engine is imported by it, and without the engine it runs."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from meshlora_judge.case import random_tokens
from tests.judge_alone import PACKAGES
from tests.scripts import ROOT

# What each of the two may import of ours.
MAY = {"meshlora_ground": {"meshlora_ground"}, "meshlora_judge": {"meshlora_ground", "meshlora_judge"}}


def test_judge_and_ground_import_nothing_of_the_engine() -> None:
    wrong = []
    for package in PACKAGES:
        for file in sorted((ROOT / "src" / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                ours = {name.partition(".")[0] for name in names if name.startswith("meshlora")}
                wrong += [f"{file.relative_to(ROOT)}:{node.lineno}: {name}" for name in ours - MAY[package]]  # type: ignore[attr-defined]
    assert not wrong


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], Path]:
    """(what the program says, its folder), where there is nothing of ours but the two packages."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("files")
    for package in PACKAGES:
        shutil.copytree(ROOT / "src" / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    program = [sys.executable, "-I", str(ROOT / "tests" / "judge_alone.py"), str(folder), str(site)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder


@pytest.mark.long
def test_every_file_of_judge_and_ground_is_imported_without_the_engine(alone: tuple[dict[str, object], Path]) -> None:
    files = [file for package in PACKAGES for file in (ROOT / "src" / package).rglob("*.py")]
    assert alone[0]["files"] == len(files) - len(PACKAGES)


@pytest.mark.long
def test_reference_runs_without_the_engine(alone: tuple[dict[str, object], Path]) -> None:
    """Its first loss is that of transformers and peft, over the sequences of the order that docs/oracle.md states."""
    said, folder = alone
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    model = PeftModel.from_pretrained(model, str(folder / "adapter"))
    data, total, number = random_tokens(num_sequences=7, vocab_size=40, seed=0), 0.0, 0
    keys = np.random.PCG64(np.random.SeedSequence(0, spawn_key=(0,))).random_raw(7)
    for index in np.argsort(keys)[:4].tolist():
        ids = torch.from_numpy(data[index].input_ids.astype("int64"))[None]
        labels = torch.where(torch.from_numpy(data[index].is_trained.copy())[None], ids, -100)
        if count := int((labels[:, 1:] != -100).sum()):
            total, number = total + float(model(input_ids=ids, labels=labels).loss) * count, number + count
    losses = said["losses"]
    # The judge lifts what llama computes in float32.
    assert losses[0] == pytest.approx(total / number, rel=1e-6)  # type: ignore[index]
    assert len(set(losses)) == 3  # type: ignore[arg-type, call-overload]
    assert (folder / "alone" / "adapter_model.safetensors").is_file()
