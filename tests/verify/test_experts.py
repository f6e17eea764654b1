"""The judge on mixtures of experts: what one rank has wrong of one expert, or of one token's choice, is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshlora.verify import proof as proofs
from meshlora.verify.options import Request
from meshlora.verify.proof import Processes
from meshlora.verify.request import prepare_proof
from meshlora_ground.topology import Topology
from meshlora_judge.diagnosis.diagnose import first_divergence
from meshlora_judge.judge import Evidence, judge
from meshlora_judge.trace import Trace
from meshlora_judge.unshard import by_expert

_TOPOLOGY = Topology.parse("dp=2,tp=2,sp,ep=2")  # so that each expert lies on two ranks
_FIRST = "model.layers.0.mlp.experts.{}.gate_up_proj.lora_{}"
_CHOICES = "model.layers.1.mlp.experts#router choices"


@pytest.fixture(scope="module")
def evidence(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """One run of ours that agrees, for all tests to spoil copies of."""
    request = Request(
        (str(_TOPOLOGY),), family="mixtral", steps=1, cache_dir=tmp_path_factory.mktemp("experts"), device="cpu"
    )
    proof = prepare_proof(request)
    worker, pool = processes.reference("cpu"), processes.ranks(_TOPOLOGY.world, "cpu")
    case, reference, rounded = proofs.reference_of(proof, worker)
    return proofs.evidence_of((case, reference, rounded), _TOPOLOGY, None, pool, worker, timeout_s=300)


def _failing(evidence: Evidence, spoil: Callable[[Evidence], None]) -> tuple[dict[str, list[str]], str]:
    spoiled = copy.deepcopy(evidence)
    spoil(spoiled)
    phases = list(judge(spoiled))
    found = {phase.name: [r.name for r in phase.results if not r.passed] for phase in phases if not phase.passed}
    divergence = first_divergence(phases, spoiled)
    return found, divergence.cause if divergence else ""


@pytest.mark.long
def test_each_expert_has_a_result_of_its_own_and_all_agree(evidence: Evidence) -> None:
    phases = {phase.name: phase for phase in judge(evidence)}
    assert all(phase.passed for phase in phases.values()), [p.worst for p in phases.values() if not p.passed]
    names = {result.name for result in phases["gradients"].results}
    assert {_FIRST.format(expert, side) for expert in range(8) for side in "AB"} <= names
    assert {r.name for r in phases["router_choices"].results} == {
        f"model.layers.{layer}.mlp.experts#router choices" for layer in (0, 1)
    }


@pytest.mark.long
def test_experts_are_known_by_their_matrices(evidence: Evidence) -> None:
    for rank, trace in enumerate(evidence.ranks):
        own = {name for name in trace.gradients if "experts" in name and name.endswith("gate_up_proj.lora_A")}
        first = _TOPOLOGY.expert_coordinates(rank)["ep"] * 4
        expected = {_FIRST.format(expert, "A") for expert in range(first, first + 4)}
        assert {name for name in own if ".layers.0." in name} == expected


def test_one_copy_of_one_expert_that_lacks_the_other_ranks_gradient_is_named(evidence: Evidence) -> None:
    name = _FIRST.format(5, "A")

    def spoil(spoiled: Evidence) -> None:
        holder = next(trace for trace in reversed(spoiled.ranks) if name in trace.gradients)
        holder.gradients[name] = holder.gradients[name] / 2

    found, _ = _failing(evidence, spoil)
    assert found["gradients"] == [name]


def test_gradients_that_are_not_summed_over_copies_are_called_so(evidence: Evidence) -> None:
    def spoil(spoiled: Evidence) -> None:
        generator = torch.Generator().manual_seed(0)
        for name in [n for n in spoiled.reference.gradients if ".experts." in n]:
            holders = [trace for trace in spoiled.ranks if name in trace.gradients]
            noise = torch.randn(holders[0].gradients[name].shape, generator=generator, dtype=torch.float64)
            whole = holders[0].gradients[name]
            holders[0].gradients[name], holders[1].gradients[name] = whole + noise, -noise

    found, cause = _failing(evidence, spoil)
    assert found["gradients"]
    assert "not summed over edp" in cause


def test_expert_that_nobody_holds_is_missed(evidence: Evidence) -> None:
    name = _FIRST.format(2, "B")

    def spoil(spoiled: Evidence) -> None:
        del spoiled.ranks[0].gradients[name]

    found, _ = _failing(evidence, spoil)
    assert found["gradients"] == [name]


def test_expert_without_tokens_has_a_gradient_of_zeros_on_both_sides(evidence: Evidence) -> None:
    name = _FIRST.format(3, "A")

    def silence(spoiled: Evidence) -> None:
        for trace in [spoiled.reference, *spoiled.ranks]:
            for kind in (trace.gradients, *trace.clipped):
                if name in kind:
                    kind[name] = torch.zeros_like(kind[name])

    def spoil(spoiled: Evidence) -> None:
        silence(spoiled)
        next(trace for trace in spoiled.ranks if name in trace.gradients).gradients[name][0, 0] = 1e-9

    assert not _failing(evidence, silence)[0]
    assert _failing(evidence, spoil)[0]["gradients"] == [name]


def test_one_token_that_goes_to_another_expert_is_counted(evidence: Evidence) -> None:
    def spoil(spoiled: Evidence) -> None:
        choices = spoiled.ranks[1].micro_batches[0].forward[_CHOICES]
        choices[0] = choices[0].flip(0)

    spoiled = copy.deepcopy(evidence)
    spoil(spoiled)
    (phase,) = [phase for phase in judge(spoiled) if not phase.passed]
    assert phase.name == "router_choices"
    assert [r.note for r in phase.results if not r.passed] == ["1 tokens go elsewhere"]


def test_exchanged_experts_are_seen_as_what_they_are() -> None:
    """A rank that holds the matrices of other experts holds these experts, whatever its place says."""
    rows = torch.arange(24).view(4, 6)
    reference = Trace(rows={"m.experts.down_proj": rows}, columns={"m.experts.down_proj": rows + 100})
    ours = Trace(rows={"m.experts.down_proj": rows[[3, 0]]}, columns={"m.experts.down_proj": rows[[3, 0]][:, :2] + 100})
    ours.gradients = {"m.experts.down_proj.lora_A": torch.tensor([[[3.0]], [[0.0]]])}
    found = by_expert(ours, reference, Topology(dp=2, ep=2), 1)
    assert {name: float(t) for name, t in found.gradients.items()} == {
        "m.experts.3.down_proj.lora_A": 3.0,
        "m.experts.0.down_proj.lora_A": 0.0,
    }


def test_proof_of_an_adapter_on_experts_starts_from_one_that_peft_reads(tmp_path: Path) -> None:
    lora = {"r": 2, "target_parameters": ["experts.up_proj"], "share_experts": True}
    case = prepare_proof(Request(("ep=2",), family="mixtral", lora=lora, cache_dir=tmp_path)).case
    assert case.share_experts
    assert set(case.pieces.values().__iter__().__next__()) == {"up"}
    assert case.lora["target_modules"] == []
