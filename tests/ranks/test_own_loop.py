"""The loop of a user's own: examples/own_loop.py gives one adapter on every topology, and the docs show that file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshlora.oracle.compare import compare_adapters

ROOT = Path(__file__).parents[2]
SCRIPT = "examples/own_loop.py"
LIMIT = 1e-6  # lifted float64, after three steps of AdamW, which divides by small numbers


def _run(out: Path, *options: str, nproc: int = 1) -> list[str]:
    """The losses that rank 0 prints; torchrun starts the ranks where there are several."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc > 1 else []
    command = [sys.executable, *launcher, SCRIPT, "--dtype", "float64", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """(adapter, losses) of one process."""
    out = tmp_path_factory.mktemp("alone") / "adapter"
    return out, _run(out)


@pytest.mark.parametrize("topology", ["tp=2,sp", "dp=2"])
def test_own_loop_saves_the_adapter_of_one_process(
    topology: str, alone: tuple[Path, list[str]], tmp_path: Path
) -> None:
    adapter, losses = alone
    assert len(losses) == 3
    assert _run(tmp_path / "adapter", "--topology", topology, nproc=2) == losses
    worst = compare_adapters(tmp_path / "adapter", adapter)
    assert worst.relative <= LIMIT, worst


def test_the_page_shows_the_file_as_it_is() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    block = page.partition("```python\n")[2].partition("```\n")[0]
    assert block == (ROOT / SCRIPT).read_text(encoding="utf-8")
