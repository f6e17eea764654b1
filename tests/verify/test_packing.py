"""Packed rows train what one process trains on the sequences one by one, and faults in packing show."""

from __future__ import annotations

import pytest

from meshlora.verify.faults.of_objectives import PROVED
from meshlora.verify.faults.registry import MUTATIONS
from meshlora.verify.options import Request
from meshlora.verify.request import prepare_proof
from meshlora_ground.errors import UnsupportedError, UserError
from tests.conftest import Prove


@pytest.mark.parametrize("topology", ["tp=2,sp", pytest.param("dp=2", marks=pytest.mark.proof)])
def test_packed_rows_are_the_sequences_one_by_one_on_every_mesh(topology: str, prove: Prove) -> None:
    (outcome,) = prove(family="qwen3", packing=True, topologies=(topology,), steps=1)
    assert outcome.passed, (outcome.divergence, outcome.error)


@pytest.mark.parametrize(
    ("family", "topology"),
    [
        ("llama", "dp=2"),
        pytest.param("qwen3", "tp=2,sp", marks=pytest.mark.proof),
        pytest.param("llama", "pp=2", marks=pytest.mark.proof),
        pytest.param("gpt_oss", "tp=2,sp", marks=pytest.mark.proof),
    ],
)
def test_sequences_of_a_micro_batch_are_one_row(family: str, topology: str, prove: Prove) -> None:
    """With recomputation and a resumed run; gpt_oss has windows and sinks."""
    options = {"recompute": True, "resume": True, "steps": 2}
    (outcome,) = prove(family=family, packing="auto", topologies=(topology,), **options)
    assert outcome.passed, (outcome.divergence, outcome.error)


@pytest.mark.long
@pytest.mark.parametrize("topology", ["cp=2", pytest.param("pp=2", marks=pytest.mark.proof)])
def test_masks_that_a_model_makes_without_positions_are_made_with_them(topology: str, prove: Prove) -> None:
    """With windows and sinks; each part has its own mask of the packed row."""
    (outcome,) = prove(family="gpt_oss", packing=True, topologies=(topology,), steps=1)
    assert outcome.passed, (outcome.divergence, outcome.error)


@pytest.mark.long
def test_policy_reads_its_columns_and_the_base_in_packed_rows(prove: Prove) -> None:
    (outcome,) = prove(family="qwen3", objective=PROVED["policy"], packing=True, topologies=("dp=2",))
    assert outcome.passed, (outcome.divergence, outcome.error)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=pytest.mark.proof), "float32"])
def test_experts_with_load_balancing(dtype: str, prove: Prove) -> None:
    """Below float64 routing is replayed: the judge knows each token of a packed row."""
    (outcome,) = prove(family="qwen3_moe", packing=True, topologies=("tp=2,sp,ep=2",), dtype=dtype, steps=1)
    assert outcome.passed, (outcome.divergence, outcome.error)


def test_without_packing_these_faults_are_not_tried() -> None:
    of_packing = tuple(name for name in MUTATIONS if name.startswith("packing"))
    proof = prepare_proof(Request(family="qwen3", topologies=("dp=2",), mutations=of_packing))
    assert proof.mutations_on(proof.topologies[0]) == []


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(UserError, match="a pair is two rows"):
        prepare_proof(Request(family="qwen3", topologies=("dp=2",), packing=True, objective=PROVED["dpo"]))
    with pytest.raises(UnsupportedError, match="its layers mix sequences of one row"):
        prepare_proof(Request(family="lfm2", topologies=("dp=2",), packing=True))


@pytest.mark.long
@pytest.mark.parametrize("topology", ["dp=2", pytest.param("tp=2,sp", marks=pytest.mark.proof)])
def test_dropout_of_packed_tokens_is_that_of_the_same_tokens_unpacked(topology: str, prove: Prove) -> None:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.1}
    (outcome,) = prove(family="qwen3", packing=True, lora=lora, topologies=(topology,), steps=1)
    assert outcome.passed, (outcome.divergence, outcome.error)
