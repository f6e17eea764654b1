"""Ranks whose evaluations differ in the last bit end at the same step: the one that rank 0 says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshlora.run import trained
from meshlora.run.checkpoint.manifest import read_whole
from tests.pool import Pool
from tests.ranks.test_trainer import folder, run_and_keep_groups, run_file

__all__ = ["folder"]  # a fixture

# By rank: only the first sees no improvement.
LOSSES = ([1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 0.9, 0.8, 0.7, 0.6])


def _run(file: Path) -> None:
    given = trained.TrainedAdapter.evaluate
    trained.TrainedAdapter.evaluate = lambda self, _: (LOSSES[self.mesh.rank][self.done - 1], 1)  # type: ignore[method-assign]
    try:
        run_and_keep_groups(file, 2)
    finally:
        trained.TrainedAdapter.evaluate = given  # type: ignore[method-assign]


def test_rank_0_decides_for_all(folder: Path, pools: Callable[[int], Pool]) -> None:
    options = {"steps": 5, "eval_every": 1, "save_every": 0, "early_stopping": {"patience": 2}}
    file = run_file(folder, "stops", "dp=2", **{f"train__{key}": value for key, value in options.items()})
    pools(2).run(_run, file)
    assert read_whole(folder / "stops" / "adapter", kinds=("adapter",)).step == 3
