"""Fused kernels in a proof, as on the devices of a run: on CPUs by a stand-in, and by the real ones where these are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshlora.verify import request as module
from meshlora.verify.options import Request
from meshlora.verify.proof import Outcome, Processes, run_proof
from meshlora.verify.request import prepare_proof
from tests.kernels import real_kernels, stand_in
from tests.verify.run_cases import OF_KERNELS, OF_SUMS, OF_TAILS, needing


@pytest.fixture
def prove(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processes: Processes
) -> Callable[..., dict[str | None, Outcome]]:
    """`prove(install, family=..., topology=...)`: fault -> outcome, with the kernels that `install` gives each rank."""
    monkeypatch.setattr(module, "with_kernels", lambda base, **_: (base, ""))  # which asks for a GPU

    def run(install: Callable[[], None], *, topology: str, **asked: Any) -> dict[str | None, Outcome]:
        given = {"dtype": "float32", "device": "cpu", "kernels": "liger", "cache_dir": tmp_path, "steps": 1}
        proof = prepare_proof(Request((topology,), **given | asked))
        processes.ranks(proof.topologies[0].world, "cpu").run(install)
        return {outcome.mutation: outcome for outcome in run_proof(proof, processes)}

    return run


def _check(found: dict[str | None, Outcome]) -> None:
    plain = found.pop(None)
    assert plain.passed, (plain.divergence, plain.error)
    where = {name: (o.divergence.phase, o.divergence.name) for name, o in found.items() if o.divergence}
    assert where == {name: (OF_KERNELS | OF_TAILS | OF_SUMS)[str(name)] for name in found}


def test_every_fault_of_kernels_is_named() -> None:
    own = "kernel_norms", "kernel_rotations", "kernel_gates"
    assert OF_KERNELS.keys() == {name for each in own for name in needing(each)}
    assert OF_TAILS.keys() == {*needing("tails"), *needing("loss_chunks")}
    assert OF_SUMS.keys() == set(needing("stream_sums"))


_ALL = (*OF_KERNELS, *OF_TAILS, *OF_SUMS)
_OF_GATES = tuple(name for name in OF_KERNELS if name in needing("kernel_gates"))
_CHUNK = ("chunk_gradient_without_labels",)
_ATTENTION_ALONE = {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}


@pytest.mark.parametrize(
    ("family", "options", "absent"),
    [
        pytest.param("llama", {}, _OF_GATES, marks=pytest.mark.long, id="all"),
        # Whose adapter leaves gates and sums as they are; whose layers and rotations are no known ones; whose gate is
        # GELU, and logits are capped.
        pytest.param("llama", _ATTENTION_ALONE, (*OF_SUMS, *set(OF_TAILS) - set(_CHUNK)), id="an adapter elsewhere"),
        pytest.param(
            *("olmo2", {}, (*OF_SUMS, *_OF_GATES, *needing("kernel_rotations"))),
            marks=pytest.mark.long,
            id="other layers",
        ),
        pytest.param("gemma2", {}, (*OF_SUMS, *OF_TAILS), marks=pytest.mark.long, id="other gates"),
        pytest.param("llama", {"kernels": "liger"}, (*OF_SUMS, *OF_TAILS), marks=pytest.mark.long, id="liger"),
    ],
)
def test_each_fault_of_kernels_that_may_show_does(
    family: str, options: dict[str, Any], absent: tuple[str, ...], prove: Any
) -> None:
    """Code that no kernel computes has no fault of one: it cannot show, and is not injected in vain."""
    found = prove(stand_in, family=family, **{"kernels": "fused", "topology": "", "mutations": _ALL} | options)
    assert found.pop(None).passed
    assert found.keys() == set(_ALL) - set(absent)
    assert [name for name, outcome in found.items() if outcome.passed] == []


@pytest.mark.parametrize(
    ("topology", "faults"),
    [("", ("kernel_writes_product_over_gate",)), pytest.param("tp=2,sp", tuple(OF_KERNELS), marks=pytest.mark.proof)],
)
def test_a_model_with_kernels_trains_as_one_process(topology: str, faults: tuple[str, ...], prove: Any) -> None:
    _check(prove(stand_in, family="llama", topology=topology, recompute=True, mutations=faults))


@pytest.mark.parametrize(
    ("topology", "faults"),
    [
        ("", ("tail_left_out_of_gradient_of_product", "chunk_gradient_without_labels", *OF_SUMS)),
        pytest.param("tp=2,sp", tuple(OF_TAILS), marks=pytest.mark.proof),
        pytest.param("dp=2,dp_shard", (), marks=pytest.mark.proof),
        pytest.param("cp=2", (), marks=pytest.mark.proof),
        pytest.param("pp=2", (), marks=pytest.mark.proof),
    ],
)
def test_a_model_with_low_rank_terms_in_its_gates_does(topology: str, faults: tuple[str, ...], prove: Any) -> None:
    given = {"family": "llama", "kernels": "fused", "topology": topology, "recompute": topology == "tp=2,sp"}
    _check(prove(stand_in, **given, mutations=faults))


# Norms of gemma and olmo2, gated MLPs with GELU, rotations after a norm, experts, packed rows, a ring, stages.
@pytest.mark.proof
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {"topology": "tp=2,sp"}) for family in ("gemma2", "gemma3_text", "qwen3", "olmo2", "mistral")),
        ("qwen3_moe", {"topology": "dp=2,ep=2"}),
        ("llama", {"topology": "tp=2", "packing": "auto"}),
        ("llama", {"topology": "cp=2,ring"}),
        ("llama", {"topology": "pp=2"}),
        ("llama", {"topology": "dp=2,dp_shard"}),
        (
            "llama",
            {"topology": "dp=2", "adapters": 1, "lora": {"r": 4, "target_modules": "all-linear", "use_dora": True}},
        ),
    ],
)
def test_other_families_and_topologies_do(family: str, options: dict[str, Any], prove: Any) -> None:
    _check(prove(stand_in, family=family, **options))


@pytest.mark.liger
@pytest.mark.parametrize(("family", "topology"), [("llama", "tp=2,sp"), ("gemma2", ""), ("qwen3", ""), ("olmo2", "")])
def test_the_real_kernels_do(family: str, topology: str, prove: Any) -> None:
    _check(prove(real_kernels, family=family, topology=topology, recompute=True))
