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
import torch
from peft import LoraConfig

import meshlora
from meshlora.comm.collectives import all_reduce_sum
from meshlora.train.batches import share
from meshlora_ground.errors import UserError
from meshlora_judge.compare import compare_adapters
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "run"),
    [
        ("tp=2,sp", _under_forked_torchrun),
        pytest.param("tp=2,sp", _under_torchrun, marks=pytest.mark.proof),
        pytest.param("dp=2", _in_a_pool, marks=pytest.mark.proof),
        pytest.param("pp=2", _in_a_pool, marks=pytest.mark.proof),
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


def _steps(topology: str, out: Path) -> list[float]:
    """Body of a rank: a loop with `language_model_loss`, of padded and of packed rows; the mean losses."""
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = meshlora.load(str(ROOT / "examples/tiny_base"), lora=lora, topology=topology, dtype="float64").train()
    mesh = model.meshlora.mesh
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    numbers = torch.Generator().manual_seed(0)
    losses = []
    for step in range(2):
        rows = share([0, 1, 2, 3], dp_rank=mesh.dp.rank, dp_size=mesh.dp.size, micro_batch_size=2)
        drawn = torch.randint(3, 200, (4, 24), generator=numbers)
        documents = torch.cat([torch.arange(13), torch.arange(11)]) if step else torch.arange(24)
        loss_sum, num_tokens = torch.zeros(1, dtype=torch.float64), 0
        for part in rows:
            ids = drawn[part]
            labels = torch.where(documents == 0, -100, ids)
            position_ids = documents.expand_as(ids) if step else None
            mask = None if step else torch.ones_like(ids)
            with meshlora.lift():
                loss = meshlora.language_model_loss(model, ids, mask, labels, position_ids=position_ids)
            loss.backward()
            loss_sum, num_tokens = loss_sum + loss.detach(), num_tokens + int((labels != -100).sum())
        total = meshlora.finish_gradients(model, num_tokens=num_tokens)
        meshlora.clip_gradients(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(all_reduce_sum(loss_sum, mesh.data)) / total)
    meshlora.save_adapter(model, str(out))
    ids = torch.randint(3, 200, (1, 6), generator=numbers)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
    assert whole.shape[:2] == ids.shape
    if mesh.cp.size > 1:
        with pytest.raises(UserError, match="a forward with gradients of whole sequences on cp=2"):
            model(input_ids=ids, use_cache=False)
    return losses


@pytest.mark.proof
def test_a_loop_of_ones_own_on_cut_sequences_is_that_of_one_process(
    pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    """Each cp rank is given the same rows and counts; the loss is of its own tokens."""
    (alone,) = pools(1).run(_steps, "", tmp_path / "alone")
    found = pools(2).run(_steps, "cp=2", tmp_path / "cut")
    assert found[0] == found[1] == pytest.approx(alone, rel=1e-12)
    worst = compare_adapters(tmp_path / "cut", tmp_path / "alone")
    assert worst.relative <= LIMIT, worst


def test_the_page_shows_the_file_as_it_is() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    block = page.partition("```python\n")[2].partition("```\n")[0]
    assert block == (ROOT / SCRIPT).read_text(encoding="utf-8")
