"""Checkpoints in few bits, proved as they are: transformers reads them on one process, each rank its own slices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Prove
from tests.packed import KEPT, PUBLISHED, write_packed

# Whose matrices are cut over etp.
EXPERTS = (
    "mxfp4",
    "fp8 experts",
    "fp8 with mxfp4 experts",
    "compressed-tensors nvfp4 experts",
    "modelopt nvfp4 experts",
    "modelopt nvfp4 stack",
    "compressed-tensors int4 experts",
    "gptq experts",
    "gptq experts in order",
    "awq experts",
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "topology", "quantization"),
    [
        ("fp8", "tp=2,sp", None),
        ("fp8 experts", "dp=2,ep=2", "keep"),
        ("mxfp4", "tp=2,sp,ep=2", "keep"),
        pytest.param("gptq", "tp=2", None, marks=pytest.mark.proof),
        ("nf4", "dp=2,dp_shard", "keep"),
        ("gptq experts in order", "tp=2,sp,ep=2", "keep"),
        *(pytest.param(case, "dp=2,tp=2,sp", None, marks=pytest.mark.proof) for case in PUBLISHED),
        *(pytest.param(case, "dp=2,tp=2,sp", "keep", marks=pytest.mark.proof) for case in KEPT),
        pytest.param("compressed-tensors int4 experts", "tp=2,etp=2", None, marks=pytest.mark.proof),
        *(pytest.param(case, "tp=2,etp=2", "keep", marks=pytest.mark.proof) for case in EXPERTS),
        pytest.param("fp8", "dp=2,tp=2,sp,dp_shard", "keep", marks=pytest.mark.proof),
        pytest.param("modelopt nvfp4", "dp=2,tp=2,sp,dp_shard", "keep", marks=pytest.mark.proof),
        pytest.param("modelopt nvfp4 experts", "tp=2,sp,ep=2", "keep", marks=pytest.mark.proof),
        pytest.param("fp8 with mxfp4 experts", "tp=2,sp,ep=2", "keep", marks=pytest.mark.proof),
    ],
)
def test_checkpoint_as_it_is_published_trains_as_on_one_process(
    case: str, topology: str, quantization: str | None, tmp_path: Path, prove: Prove
) -> None:
    folder = write_packed(tmp_path / "model", case)
    (outcome,) = prove(model=folder, topologies=(topology,), quantization=quantization, steps=1)
    assert outcome.passed, outcome.divergence or outcome.error
