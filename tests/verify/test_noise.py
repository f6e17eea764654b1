"""Noise on embedded tokens on meshes is that of one process, in float64, wherever sequences lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora.verify import preflight
from meshlora.verify.faults.of_objectives import PROVED
from tests.conftest import Prove
from tests.ranks.test_trainer import folder, run_file

__all__ = ["folder"]  # a fixture

ON_EMBEDDING = {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}


@pytest.mark.long
@pytest.mark.parametrize(
    "request_",
    [
        # A scale inside the embedding's own module, and LoRA on it.
        {"family": "gemma3_text", "topologies": ("tp=2,sp",), "lora": ON_EMBEDDING},
        {"family": "qwen3", "topologies": ("dp=2",), "packing": True},
        *(
            pytest.param(given, marks=pytest.mark.proof)
            for given in (
                {"family": "gemma2", "topologies": ("pp=2", "cp=2"), "packing": True},
                {"family": "qwen3", "topologies": ("cp=2,ring", "dp=2,tp=2,sp"), "recompute": True, "packing": "auto"},
                {"family": "qwen3", "topologies": ("tp=2,sp",), "steps": 3, "resume": True},
                {"family": "qwen3", "topologies": ("tp=2,sp",), "objective": PROVED["kto"]},
                {"family": "qwen3_moe", "topologies": ("tp=2,sp,ep=2",)},
                {"family": "bert", "topologies": ("dp=2",), "objective": PROVED["classify"]},
                {"family": "qwen3", "topologies": ("dp=2",), "dtype": "bfloat16"},
                {"family": "qwen3", "topologies": ("tp=2",), "adapters": 2},
            )
        ),
    ],
    ids=str,
)
def test_noise_is_that_of_one_process_on_every_mesh(request_: dict[str, Any], prove: Prove) -> None:
    outcomes = prove(**{"neftune_alpha": 5.0, "steps": 2} | request_)
    assert all(o.passed for o in outcomes), [(o.topology, o.divergence, o.error) for o in outcomes]


def test_preflight_proves_the_noise_of_the_run(folder: Path) -> None:
    run = prepare_run(read_run(run_file(folder, "noisy", "tp=2", train__neftune_alpha=7.5)))
    proof, _ = preflight.proof_of(run, folder)
    assert proof.case.neftune_alpha == 7.5
    assert "noise" in proof.features_on(proof.topologies[0])
