"""Dropout on meshes is that of one process with the same masks, in float64, also in what the preflight proves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from meshlora.plan.own_dropouts import EXACT_DROPOUTS
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora.verify import preflight, stand_in
from meshlora.verify.options import Request
from meshlora.verify.request import prepare_proof
from meshlora_ground.errors import UnsupportedError
from tests.conftest import Prove
from tests.ranks.test_trainer import folder, run_file

__all__ = ["folder"]  # a fixture

# The last has all axes; on the others by `make proof`.
TOPOLOGIES = ("tp=2,sp", "dp=2", "dp=2,tp=2,sp")
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.1}
GPT2 = {"family": "gpt2", "overrides": {"resid_pdrop": 0.1, "embd_pdrop": 0.1}, "lora": LORA}
OFTEN = "gpt_neox"


@pytest.mark.long
@pytest.mark.parametrize("topologies", [TOPOLOGIES[-1:], pytest.param(TOPOLOGIES, marks=pytest.mark.proof)], ids=len)
def test_dropout_of_the_adapter_and_of_the_model_is_that_of_one_process_on_every_mesh(
    topologies: tuple[str, ...], prove: Prove
) -> None:
    outcomes = prove(**GPT2, topologies=topologies, steps=2)
    assert [str(o.topology) for o in outcomes] == list(topologies)
    assert all(o.passed for o in outcomes), [(o.topology, o.divergence, o.error) for o in outcomes]


@pytest.mark.proof  # of qwen3 with dropout, on this mesh: tests/verify/test_objectives.py
def test_dropout_of_an_adapter_is_that_of_one_process(prove: Prove) -> None:
    (outcome,) = prove(family="qwen3", lora=LORA, topologies=("dp=2,tp=2,sp",), steps=2)
    assert outcome.passed, (outcome.divergence, outcome.error)


@pytest.mark.parametrize(
    "family",
    [OFTEN, *(pytest.param(f, marks=pytest.mark.proof) for f in sorted(EXACT_DROPOUTS.keys() - {"gpt2", OFTEN}))],
)
def test_every_dropout_of_the_table_is_exact(family: str, prove: Prove) -> None:
    overrides = dict.fromkeys(EXACT_DROPOUTS[family], 0.1)
    later = "dropout_of_later_tokens_as_the_first"
    outcome, mutated = prove(family=family, overrides=overrides, topologies=("tp=2,sp",), steps=1, mutations=(later,))
    assert outcome.passed, (outcome.divergence, outcome.error)
    assert mutated.divergence.phase == "forward", mutated.error


def test_a_case_with_dropout_is_another_case() -> None:
    """Or the reference of one without would be taken from the cache."""
    plain, of_model, of_both = (
        prepare_proof(Request(topologies=("dp=2",), **request))  # type: ignore[arg-type]
        for request in ({"family": "gpt2"}, GPT2 | {"lora": Request(()).lora}, GPT2)
    )
    assert (plain.case.dropout, of_both.case.dropout) == ((), ("embd_pdrop", "resid_pdrop"))
    assert len({proof.key for proof in (plain, of_model, of_both)}) == 3
    has = [
        {f for f in proof.features_on(proof.topologies[0]) if "dropout" in f} for proof in (plain, of_model, of_both)
    ]
    assert has == [set(), {"dropout", "model_dropout"}, {"dropout", "model_dropout", "lora_dropout"}]


def test_a_twin_with_dropout_that_is_not_exact_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"attn_pdrop=0\.1"):
        prepare_proof(Request(topologies=("dp=2",), family="gpt2", overrides={"attn_pdrop": 0.1}))


def test_the_preflight_proves_the_dropouts_of_the_run(folder: Path) -> None:
    run = prepare_run(read_run(run_file(folder, "with-dropout", "tp=2", lora__lora_dropout=0.2)))
    proof, _ = preflight.proof_of(run, folder)
    assert proof.case.lora["lora_dropout"] == 0.2
    given = prepare_proof(Request(topologies=("dp=2",), **GPT2 | {"overrides": {"resid_pdrop": 0.3}})).config  # type: ignore[arg-type]
    given.attn_pdrop = 0.4
    for disable, rates in (("unsupported", (0.3, 0.0)), (True, (0.0, 0.0))):
        options = dataclasses.replace(run.blueprint.options, disable_dropout=disable)  # type: ignore[arg-type]
        blueprint = dataclasses.replace(run.blueprint, config=given, options=options)
        config = stand_in.StandIn(dataclasses.replace(run, blueprint=blueprint)).config
        assert (config.resid_pdrop, config.attn_pdrop) == rates
