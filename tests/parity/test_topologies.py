"""The promise in full, on three families: logits, loss, gradients and the adapter after five clipped AdamW steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from meshlora.plan.topology import Topology
from tests.parity.harness import Numbers, compare, make_batches, make_twin, run_ours, run_reference
from tests.pool import Pool

FAMILIES = ("llama", "qwen3", "gemma2")
TOPOLOGIES = ("tp=2", "tp=2,sp", "dp=2", "dp=2,tp=2", "dp=2,tp=2,sp", "tp=4,sp", "tp=4", "dp=4")
STEPS = 5
LIMITS = {"logits": 1e-11, "loss": 1e-11, "gradients": 1e-11, "grad_norm": 1e-11, "adapter": 1e-6}


@pytest.fixture(scope="module", params=FAMILIES)
def reference_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Numbers]:
    """(family, folder, the reference's numbers), run once for all topologies."""
    folder = make_twin(tmp_path_factory.mktemp(request.param), request.param)
    return request.param, folder, run_reference(folder, make_batches(), steps=STEPS)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_adapter_is_the_one_a_single_process_produces(
    topology: str,
    reference_run: tuple[str, Path, Numbers],
    pools: Callable[[int], Pool],
    parity_table: dict[tuple[str, str], float],
) -> None:
    family, folder, ref = reference_run
    world = Topology.parse(topology).world
    ours = pools(world).run(run_ours, folder, make_batches(), topology, STEPS)[0]
    errors = compare(ours, ref)
    parity_table[family, topology] = max(errors[phase] for phase in ("logits", "loss", "gradients", "grad_norm"))
    assert all(errors[phase] <= limit for phase, limit in LIMITS.items()), errors
