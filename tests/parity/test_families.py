"""Every family that is listed as proved, on tp=2 and tp=2,sp: each tensor against one-process transformers + peft."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshlora.plan.families import PROVED
from meshlora.verify.proof import Outcome


@pytest.mark.parametrize("family", sorted(PROVED))
def test_family_matches_one_process(family: str, prove_and_note: Callable[..., list[Outcome]]) -> None:
    outcomes = prove_and_note(family=family, topologies=("tp=2", "tp=2,sp"), steps=1)
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)
