"""The promise in full, on every topology of up to four processes: five clipped AdamW steps.

By default two steps, on topologies that have each axis alone and with another one: `tests/parity/test_families.py`
has each form of a plan on two ranks, and `tests/parity/test_heads.py` on four. Everything on each of them: `-m proof`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshlora.verify.faults.of_objectives import PROVED
from meshlora.verify.proof import Outcome
from tests.conftest import Prove

TOPOLOGIES = ("tp=2", "tp=2,sp", "dp=2", "dp=2,tp=2", "dp=2,tp=2,sp", "tp=4,sp", "tp=4", "dp=4", "")


@pytest.mark.parametrize(
    ("family", "topologies", "steps"),
    [
        ("llama", ("dp=2", "dp=2,tp=2,sp", "tp=4"), 2),
        *(pytest.param(family, TOPOLOGIES, 5, marks=pytest.mark.proof) for family in ("llama", "qwen3", "gemma2")),
    ],
)
def test_adapter_is_the_one_a_single_process_produces(
    family: str, topologies: tuple[str, ...], steps: int, prove_and_note: Callable[..., list[Outcome]]
) -> None:
    outcomes = prove_and_note(family=family, topologies=topologies, steps=steps)
    assert len(outcomes) == len(topologies)
    for outcome in outcomes:
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)
        assert {phase.name for phase in outcome.phases if phase.results} >= {
            "forward",
            "gradients",
            "deltas",
            "saved_file",
        }


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "topology", "steps"),
    [
        pytest.param("float32", "dp=2", 2, marks=pytest.mark.proof),
        ("bfloat16", "tp=2,sp", 2),
        *(
            pytest.param(dtype, topology, 3, marks=pytest.mark.proof)
            for dtype in ("float32", "bfloat16")
            for topology in ("tp=2,sp", "dp=2,tp=2")
        ),
    ],
)
def test_low_precision_stays_within_the_references_own_rounding(
    dtype: str, topology: str, steps: int, prove: Prove
) -> None:
    for outcome in prove(family="llama", topologies=(topology,), dtype=dtype, steps=steps):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("topologies", "options"),
    [
        (("pp=2,tp=2,sp",), {"family": "llama", "steps": 2}),
        (("pp=3",), {"family": "llama", "steps": 1, "overrides": {"num_hidden_layers": 4}}),  # one with neither end
        *(
            pytest.param(topologies, options, marks=pytest.mark.proof)
            for topologies, options in (
                (("pp=3,tp=2,sp", "pp=2,dp=3"), {"family": "llama", "overrides": {"num_hidden_layers": 5}}),
                (("pp=2,cp=2", "pp=2,tp=2"), {"family": "llama", "packing": True, "resume": True}),
                (("pp=2", "pp=2,tp=2,sp"), {"family": "llama", "objective": PROVED["dpo"]}),
                (("pp=2,dp=2",), {"family": "llama", "objective": PROVED["policy"]}),
                (("pp=2,interleave=2", "pp=2,dp=2,interleave=2"), {"family": "llama"}),
                (("pp=2", "pp=2,tp=2,sp,interleave=2"), {"family": "qwen3_moe"}),
                (("pp=2,dp=2,ep=2", "pp=2,tp=2,sp,ep=2", "pp=2,tp=2,sp,etp=2"), {"family": "qwen3_moe"}),
                (("pp=2,dp=2,dp_shard",), {"family": "llama"}),
                (("pp=2", "pp=2,tp=2,sp,interleave=2"), {"family": "llama", "recompute": True}),
                (("pp=2,tp=2,sp",), {"family": "llama", "quantization": "mxfp4"}),
                (("pp=2",), {"family": "llama", "adapters": 2}),
                (("pp=2",), {"family": "gemma2"}),
            )
        ),
    ],
)
def test_stages_train_what_one_process_trains(topologies: tuple[str, ...], options: Any, prove: Prove) -> None:
    for outcome in prove(topologies=topologies, **options):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("topologies", "options"),
    [
        (("tp=2,sp", "cp=2"), {"family": "llama", "packing": "auto"}),
        pytest.param(
            ("dp=2,dp_shard", "cp=3", "cp=2,ring", "tp=2,sp,cp=2", "pp=2,tp=2,sp,interleave=2"),
            {"family": "qwen3"},
            marks=pytest.mark.proof,
        ),
        pytest.param(("tp=2,sp,ep=2", "cp=2,ep=2,ring"), {"family": "qwen3_moe"}, marks=pytest.mark.proof),
        pytest.param(("cp=2,ring", "pp=2"), {"family": "gpt2", "packing": True}, marks=pytest.mark.proof),
        pytest.param(("tp=2",), {"family": "llama", "adapters": 2}, marks=pytest.mark.proof),
        pytest.param(("tp=2,sp",), {"family": "mistral", "dtype": "bfloat16"}, marks=pytest.mark.proof),
        pytest.param(("cp=2",), {"family": "qwen3_next"}, marks=pytest.mark.proof),
    ],
)
def test_attention_that_is_kept_trains_what_one_process_trains(
    topologies: tuple[str, ...], options: Any, prove: Prove
) -> None:
    given = {"recompute": "keep_attention", "attn_implementation": "sdpa", "steps": 1}
    for outcome in prove(topologies=topologies, **given | options):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("topologies", "options"),
    [
        pytest.param(("tp=2,sp", "pp=2"), {"family": "llama"}),
        pytest.param(("dp=2,dp_shard", "cp=2", "pp=2,interleave=2"), {"family": "llama"}, marks=pytest.mark.proof),
        pytest.param(("tp=2,sp,ep=2",), {"family": "qwen3_moe"}, marks=pytest.mark.proof),
    ],
)
def test_inputs_of_layers_on_the_host_train_what_one_process_trains(
    topologies: tuple[str, ...], options: Any, prove: Prove
) -> None:
    for outcome in prove(topologies=topologies, recompute="offload", steps=1, **options):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)
