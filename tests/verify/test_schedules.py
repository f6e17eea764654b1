"""Schedules on a mesh give the adapter of one process whose rates are transformers' own."""

from __future__ import annotations

import pytest

from meshlora.verify.options import of_schedule
from meshlora_judge.case import Case
from tests.conftest import Prove

FAULT = "schedule_taken_for_linear"


@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        ("cosine_with_restarts", "dp=2"),
        ("polynomial", "tp=2,sp"),
        pytest.param("cosine_with_restarts", "tp=2,sp", marks=pytest.mark.proof),
        pytest.param("polynomial", "dp=2", marks=pytest.mark.proof),
    ],
)
def test_schedule_of_transformers_trains_as_on_one_process(kind: str, topology: str, prove: Prove) -> None:
    """To a floor; and a mesh that takes it for a line is seen."""
    own = of_schedule(kind, ends_above_zero=True)  # type: ignore[arg-type]
    assert own["min_lr"] == 0.3 * Case.lr
    whole, with_fault = prove(family="llama", topologies=(topology,), mutations=(FAULT,), **own)
    assert whole.passed, (whole.divergence, whole.error)
    assert with_fault.mutation == FAULT
    assert not with_fault.passed
