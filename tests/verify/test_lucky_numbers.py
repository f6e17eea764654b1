"""The judge in low precision: what it takes for noise does not depend on how lucky the reference's own numbers are."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from meshlora.verify import proof as proofs
from meshlora.verify.options import Request
from meshlora.verify.proof import Processes
from meshlora.verify.request import prepare_proof
from meshlora_ground.topology import Topology
from meshlora_judge.judge import Evidence, judge

_TOPOLOGY = Topology.parse("tp=2")
_FACTOR = "model.layers.0.self_attn.q_proj.lora_A"
_AFTER_ADAM = ("deltas", "saved_file")


@pytest.fixture(scope="module")
def evidence(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """One run of ours in float32, beside a reference whose norms, and what AdamW made of one factor, float32 rounds to
    the right numbers.
    """
    cache: Path = tmp_path_factory.mktemp("lucky")
    request = Request((str(_TOPOLOGY),), family="llama", dtype="float32", cache_dir=cache, device="cpu")
    proof = prepare_proof(request)
    worker, pool = processes.reference("cpu"), processes.ranks(_TOPOLOGY.world, "cpu")
    case, reference, rounded = proofs.reference_of(proof, worker)
    found = proofs.evidence_of((case, reference, rounded), _TOPOLOGY, None, pool, worker, timeout_s=300)
    for trace in found.rounded:
        trace.grad_norms[:] = reference.grad_norms
        trace.final[_FACTOR] = reference.final[_FACTOR].clone()
    return found


def _wrong_by(evidence: Evidence, error: float) -> list[str]:
    """The numbers of the phase that fail where ours has the norm of the last step wrong by a relative `error`."""
    spoiled = copy.deepcopy(evidence)
    for trace in spoiled.ranks:
        trace.grad_norms[-1] = spoiled.reference.grad_norms[-1] * (1 + error)
    (phase,) = [phase for phase in judge(spoiled) if phase.name == "grad_norm"]
    return [result.name for result in phase.results if not result.passed]


@pytest.mark.long
def test_norm_may_be_off_by_what_rounding_does_to_its_gradient(evidence: Evidence) -> None:
    """Four units in the last place: seen of a right run beside a reference that was off by less than half of one."""
    assert _wrong_by(evidence, 5e-7) == []


@pytest.mark.long
def test_norm_that_is_wrong_by_more_is_still_found(evidence: Evidence) -> None:
    assert _wrong_by(evidence, 1e-5) == [f"norm of step {len(evidence.reference.grad_norms)}"]


def test_factor_may_be_off_by_what_rounding_and_adamw_make_of_others(evidence: Evidence) -> None:
    """The worst element of a factor divides by a tiny moment, or does not: that is luck, on either side."""
    assert [
        r.name for phase in judge(evidence) if phase.name in _AFTER_ADAM for r in phase.results if not r.passed
    ] == []


def test_factor_that_adamw_changed_otherwise_is_still_found(evidence: Evidence) -> None:
    spoiled = copy.deepcopy(evidence)
    for trace in spoiled.ranks:
        trace.final[_FACTOR] += 0.01 * (trace.final[_FACTOR] - trace.initial[_FACTOR])
    (phase,) = [phase for phase in judge(spoiled) if phase.name == "deltas"]
    assert [result.name for result in phase.results if not result.passed] == [_FACTOR]
