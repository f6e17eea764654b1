"""Weighted sources on ranks: the draws, the adapter and what a stopped run goes on with are those of one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from meshlora.adapter.formats.peft_format import WEIGHTS_FILE
from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from tests.pool import Pool
from tests.ranks.test_trainer import _train, folder, run_and_keep_groups, run_file
from tests.run_files import copy_lines

__all__ = ["folder"]  # a fixture


def _file(folder: Path, name: str, topology: str) -> Path:
    """A run of 4 steps, the first of which are an epoch of draws; one source is drawn more often than it has rows."""
    for source, first, last in (("much", 0, 9), ("little", 9, 12)):
        if not (folder / f"{source}.jsonl").exists():
            copy_lines("train", folder / f"{source}.jsonl", first, last)
    sources = [{"path": str(folder / f"{source}.jsonl"), "weight": w} for source, w in (("much", 1), ("little", 2))]
    return run_file(folder, name, topology, data__train=sources, train__batch_size=5)


@pytest.mark.proof
def test_run_on_weighted_sources_is_that_of_one_process_and_goes_on_to_the_same_bytes(
    folder: Path, pools: Callable[[int], Pool]
) -> None:
    for name, topology, world in (("alone", "", 1), ("sp", "tp=2,sp", 2), ("dp", "dp=2", 2)):
        file = _file(folder, name, topology)
        _train(file, 1) if world == 1 else pools(world).run(run_and_keep_groups, file, world)
    alone = folder / "alone"
    for name in ("sp", "dp"):
        assert compare_adapters(folder / name / "adapter", alone / "adapter").relative < 1e-6, name
        gap = largest_loss_gap(read_losses(folder / name / "metrics.jsonl"), read_losses(alone / "metrics.jsonl"))
        assert gap < 1e-11, name
    shutil.copytree(folder / "dp", folder / "dp-resumed", symlinks=True)
    shutil.rmtree(folder / "dp-resumed" / "adapter")
    pools(2).run(run_and_keep_groups, _file(folder, "dp-resumed", "dp=2"), 2, "auto")
    found, expected = ((folder / name / "adapter" / WEIGHTS_FILE).read_bytes() for name in ("dp-resumed", "dp"))
    assert found == expected
