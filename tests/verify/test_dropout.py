"""Dropout on meshes is that of one process with the same masks, in float64; and what cannot be so is refused."""

from __future__ import annotations

import pytest

from meshlora.plan.dropout import EXACT_DROPOUTS
from tests.conftest import Prove

TOPOLOGIES = ("tp=2,sp", "dp=2", "dp=2,tp=2,sp")
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.1}


def test_lora_dropout_and_the_models_own_are_those_of_one_process_on_every_mesh(prove: Prove) -> None:
    outcomes = prove(
        family="gpt2", overrides={"resid_pdrop": 0.1, "embd_pdrop": 0.1}, lora=LORA, topologies=("tp=2", *TOPOLOGIES)
    )
    assert [str(o.topology) for o in outcomes] == ["tp=2", *TOPOLOGIES]
    assert all(o.passed for o in outcomes), [(o.topology, o.divergence, o.error) for o in outcomes]


def test_lora_dropout_is_that_of_one_process_on_every_mesh(prove: Prove) -> None:
    outcomes = prove(family="qwen3", lora=LORA, topologies=TOPOLOGIES)
    assert all(o.passed for o in outcomes), [(o.topology, o.divergence, o.error) for o in outcomes]


@pytest.mark.parametrize("family", EXACT_DROPOUTS.keys() - {"gpt2"})
def test_every_dropout_of_the_table_is_exact(family: str, prove: Prove) -> None:
    (outcome,) = prove(family=family, overrides=dict.fromkeys(EXACT_DROPOUTS[family], 0.1), topologies=("tp=2,sp",))
    assert outcome.passed, (outcome.divergence, outcome.error)
