"""The loop of a user's own: examples/own_loop.py gives one adapter on every topology, and the docs show that file."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from meshlora.oracle.compare import compare_adapters
from tests.pool import Pool
from tests.ranks.forked import Forked

ROOT = Path(__file__).parents[2]
SCRIPT = "examples/own_loop.py"
LIMIT = 1e-6  # lifted float64, after three steps of AdamW, which divides by small numbers


def _arguments(out: Path, topology: str) -> list[str]:
    return ["--dtype", "float64", "--out", str(out), "--topology", topology]


def _as_rank(arguments: list[str]) -> list[str]:
    """Body of a rank: the script as it is; the losses that it prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.chdir(ROOT), mock.patch.object(sys, "argv", [SCRIPT, *arguments]):
        runpy.run_path(SCRIPT, run_name="__main__")
    return _losses(said.getvalue())


def _losses(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("step ")]


def _in_a_pool(out: Path, topology: str, *, world: int) -> list[str]:
    pool = Pool(world)  # of its own, for the script ends with `leave`
    try:
        return pool.run(_as_rank, _arguments(out, topology))[0]
    finally:
        pool.close()


def _under_torchrun(out: Path, topology: str, *, world: int) -> list[str]:
    command = [sys.executable, *_torchrun(world), SCRIPT, *_arguments(out, topology)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return _losses(done.stdout)


def _torchrun(world: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]


def _under_forked_torchrun(out: Path, topology: str, *, world: int) -> list[str]:
    """Its agent and its ranks have imported the libraries before they begin."""
    process = Forked(ROOT, [*_torchrun(world), SCRIPT, *_arguments(out, topology)], os.environ, said=out.parent)
    said, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return _losses(said)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """(adapter, losses) of one process."""
    out = tmp_path_factory.mktemp("alone") / "adapter"
    return out, _in_a_pool(out, "", world=1)


@pytest.mark.parametrize(
    ("topology", "run"),
    [
        ("tp=2,sp", _under_forked_torchrun),
        pytest.param("tp=2,sp", _under_torchrun, marks=pytest.mark.proof),
        ("dp=2", _in_a_pool),
    ],
)
def test_own_loop_saves_the_adapter_of_one_process(
    topology: str, run: Callable[..., list[str]], alone: tuple[Path, list[str]], tmp_path: Path
) -> None:
    adapter, losses = alone
    assert len(losses) == 3
    assert run(tmp_path / "adapter", topology, world=2) == losses
    worst = compare_adapters(tmp_path / "adapter", adapter)
    assert worst.relative <= LIMIT, worst


def test_the_page_shows_the_file_as_it_is() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    block = page.partition("```python\n")[2].partition("```\n")[0]
    assert block == (ROOT / SCRIPT).read_text(encoding="utf-8")
