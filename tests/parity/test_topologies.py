"""The promise in full, on every topology of up to four processes: five clipped AdamW steps.

By default every topology on one family, and two on another: `tests/parity/test_families.py` has one family of each plan
on two ranks. Everything on each of them: `-m proof`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshlora.verify.proof import Outcome
from tests.conftest import Prove

TOPOLOGIES = ("tp=2", "tp=2,sp", "dp=2", "dp=2,tp=2", "dp=2,tp=2,sp", "tp=4,sp", "tp=4", "dp=4", "")


FEW = ("dp=2,tp=2,sp", "tp=4")
OTHERS = ("qwen3", "gemma2")


@pytest.mark.parametrize(
    ("family", "topologies"),
    [
        ("llama", TOPOLOGIES),
        ("gemma2", FEW),
        *(pytest.param(family, TOPOLOGIES, marks=pytest.mark.proof) for family in OTHERS),
    ],
)
def test_adapter_is_the_one_a_single_process_produces(
    family: str, topologies: tuple[str, ...], prove_and_note: Callable[..., list[Outcome]]
) -> None:
    outcomes = prove_and_note(family=family, topologies=topologies, steps=5)
    assert len(outcomes) == len(topologies)
    for outcome in outcomes:
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)
        assert {phase.name for phase in outcome.phases if phase.results} >= {
            "forward",
            "gradients",
            "deltas",
            "saved_file",
        }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_precision_stays_within_the_references_own_rounding(dtype: str, prove: Prove) -> None:
    for outcome in prove(family="llama", topologies=("tp=2,sp", "dp=2,tp=2"), dtype=dtype):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)
