"""Each benchmark runs at tiny sizes, with its own check that all systems agree; the numbers mean nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import ROOT

BENCHMARKS = ROOT / "benchmarks"
# What makes a benchmark small where it has no `--tiny`; None: a test of `make test` runs it.
OPTIONS: dict[str, list[str] | None] = {
    "activation_memory": ["--tiny", "--seq", "16", "--batch", "1"],
    "before_after": ["--before", str(ROOT), "--item", "mixture", "--tiny", "--turns", "1"],
    "expert_products": ["--tiny"],
    "gpu": None,  # tests/unit/test_benchmark_gpu.py
    "gpu_ranks": ["--topology", "dp=1", "--tiny", "--device", "cpu"],
    "run_all": ["--tiny", "--item", "6", "--out", "{folder}/all"],
    "save_checkpoint": ["--experts", "4", "--rank", "2"],
}
SCRIPTS = [file.stem for file in sorted(BENCHMARKS.glob("*.py")) if "\nif __name__ ==" in file.read_text("utf-8")]


def _printed(name: str, words: list[str], folder: Path) -> str:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in SCRIPTS if OPTIONS.get(name, []) is not None])
def test_benchmark_runs_in_small(name: str, tmp_path: Path) -> None:
    given = OPTIONS.get(name) if name in OPTIONS else ["--tiny", "--json", "{folder}/found.json"]
    assert _printed(name, [word.format(folder=tmp_path) for word in given or ()], tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("words", [["--shape", "all"], ["--shape", "moe", "--gpu", "h200"]])
def test_every_shape_is_counted_in_small(words: list[str], tmp_path: Path) -> None:
    printed = _printed("step_kernels", ["--tiny", *words], tmp_path)
    assert printed.count("The costliest operators") == (3 if "all" in words else 1)


@pytest.mark.proof
def test_measured_classes_of_kernels_stand_beside_predicted_ones(tmp_path: Path) -> None:
    measured = BENCHMARKS / "results" / "gpu_nvidia-h100-80gb-hbm3_202611.json"
    printed = _printed("step_kernels", ["--beside", str(measured)], tmp_path)
    assert [line.split(" | ")[0] for line in printed.splitlines()[4:]] == [
        "| 8b, meshlora",
        "| 8b, meshlora + liger",
        "| 8b, PEFT + SDPA",
    ]


def test_options_are_of_benchmarks_that_there_are() -> None:
    assert OPTIONS.keys() <= set(SCRIPTS)
    assert len(SCRIPTS) > 15
