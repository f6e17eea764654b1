"""Checkpoints in few bits, proved as they are: transformers reads them on one process, each rank its own slices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Prove
from tests.packed import PUBLISHED, write_packed


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        ("fp8", "tp=2,sp"),
        ("fp8 experts", "dp=2,ep=2"),
        ("mxfp4", "tp=2,sp,ep=2"),
        ("gptq", "tp=2"),
        ("nf4", "dp=2,dp_shard"),
        *(pytest.param(case, "dp=2,tp=2,sp", marks=pytest.mark.proof) for case in PUBLISHED),
        pytest.param("compressed-tensors int4 experts", "tp=2,etp=2", marks=pytest.mark.proof),
        pytest.param("mxfp4", "tp=2,etp=2", marks=pytest.mark.proof),
    ],
)
def test_checkpoint_as_it_is_published_trains_as_on_one_process(
    case: str, topology: str, tmp_path: Path, prove: Prove
) -> None:
    folder = write_packed(tmp_path / "model", case)
    (outcome,) = prove(model=folder, topologies=(topology,), steps=1)
    assert outcome.passed, outcome.divergence or outcome.error
