"""Checkpoints in few bits, proved as they are: transformers reads them on one process, each rank its own slices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Prove
from tests.packed import write_packed


@pytest.mark.parametrize(
    ("family", "topology"),
    [
        ("llama", "tp=2,sp"),
        pytest.param("llama", "dp=2,dp_shard", marks=pytest.mark.proof),
        pytest.param("qwen3_moe", "tp=2,etp=2", marks=pytest.mark.proof),
        ("qwen3_moe", "dp=2,ep=2"),
        ("gpt_oss", "tp=2,sp,ep=2"),
        pytest.param("gpt_oss", "tp=2,etp=2", marks=pytest.mark.proof),
    ],
)
def test_checkpoint_as_it_is_published_trains_as_on_one_process(
    family: str, topology: str, tmp_path: Path, prove: Prove
) -> None:
    folder = write_packed(tmp_path / "model", family)
    (outcome,) = prove(model=folder, topologies=(topology,), steps=2)
    assert outcome.passed, outcome.divergence or outcome.error
