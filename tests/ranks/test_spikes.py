"""Ranks whose losses differ end at the same step: the one that rank 0 sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshlora.run import trainer
from meshlora_ground.errors import MeshloraError
from tests.pool import Pool
from tests.ranks.test_trainer import folder, run_and_keep_groups, run_file
from tests.run_files import metrics_of

__all__ = ["folder"]  # a fixture

# Rank -> the step from which on its losses are tenfold.
JUMPS = {0: 4, 1: 2}


def _run(file: Path, number: int) -> str:
    """The error with which this rank ends."""
    given, step = trainer.StepSums.add, 0
    read = trainer.StepSums.read

    def add(self: Any, adapter: int, batch: Any, count: int, loss: Any, sums: Any) -> None:
        is_high = step + 1 >= JUMPS[self._mesh.rank % 2]
        given(self, adapter, batch, count, loss * (10.0 if is_high else 1.0), sums)

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal step
        step += 1
        return read(*args, **options)

    trainer.StepSums.add, trainer.StepSums.read = add, counted  # type: ignore[method-assign]
    try:
        run_and_keep_groups(file, number)
    except MeshloraError as error:
        return str(error)
    finally:
        trainer.StepSums.add, trainer.StepSums.read = given, read  # type: ignore[method-assign]
    return ""


@pytest.mark.parametrize(("topology", "patience"), [("tp=2", 1), ("tp=2", 2), ("dp=2", 2)])
def test_all_ranks_end_at_the_step_of_rank_0(
    topology: str, patience: int, folder: Path, pools: Callable[[int], Pool]
) -> None:
    """The ranks of tp sum no losses with each other: each has its own, and rank 1 would have ended sooner."""
    name, last = f"spikes-{topology}-{patience}", JUMPS[0] + patience - 1
    options: dict[str, Any] = {"steps": 7, "save_every": 0, "eval_every": 0, "batch_size": 4}
    options["on_spike"] = {"above": 40.0, "patience": patience}
    file = run_file(folder, name, topology, **{f"train__{key}": value for key, value in options.items()})
    said = pools(2).run(_run, file, 2)
    assert all(text.startswith(f"step {last}: loss spike: ") for text in said), said
    output = folder / name
    assert max(line["step"] for line in metrics_of(output)) == last
    assert (output / "checkpoints" / f"step-00000{last}").is_dir()
