"""A slow path that one rank takes is said by rank 0, and ends all ranks where the run file says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import meshlora.run.trainer as module
from meshlora.processes.launchers import launcher_place
from meshlora_ground.errors import UserError
from meshlora_ground.slow_paths import ONE_BY_ONE, watching
from tests.pool import Pool
from tests.ranks.test_trainer import run_and_keep_groups
from tests.run_files import copy_lines, metrics_of, write_run_file


def _train(file: Path, world: int) -> str:
    """The error of a run whose last rank takes a path of its own."""
    place = launcher_place()
    assert place is not None

    def taking(taken: Any) -> Any:
        if place.rank == world - 1:
            taken.add(ONE_BY_ONE)
        return watching(taken)

    with mock.patch.object(module, "watching", taking):
        try:
            run_and_keep_groups(file, world)
        except UserError as error:
            return f"{error}"
    return ""


@pytest.mark.long
@pytest.mark.parametrize("requires", [False, True])
def test_what_one_rank_takes_all_ranks_know(requires: bool, tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    copy_lines("train", tmp_path / "train.jsonl", 0, 8)
    file = write_run_file(tmp_path / "run.yaml", train={"steps": 2, "require_fast": requires}, topology="pp=2")
    said = pools(2).run(_train, file, 2)
    lines = metrics_of(tmp_path / "run")
    if requires:
        assert len({*said}) == 1
        assert f"the run takes a slow path: {ONE_BY_ONE.what}" in said[0]
        assert lines == []
    else:
        assert said == ["", ""]
        assert [line.get("slow_paths") for line in lines] == [[str(ONE_BY_ONE)], None]
