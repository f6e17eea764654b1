"""Every family that is listed as proved, on tp=2 and tp=2,sp: each tensor against one-process transformers + peft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from meshlora.plan.families import PROVED
from tests.parity.harness import compare, make_batches, make_twin, run_ours, run_reference
from tests.pool import Pool

LIMIT = 1e-11


@pytest.mark.parametrize("family", sorted(PROVED))
def test_family_matches_one_process(
    family: str, tmp_path: Path, pools: Callable[[int], Pool], parity_table: dict[tuple[str, str], float]
) -> None:
    folder = make_twin(tmp_path, family)
    batch = make_batches()
    ref = run_reference(folder, batch, steps=1)
    for topology in ("tp=2", "tp=2,sp"):
        ours = pools(2).run(run_ours, folder, batch, topology, 1)[0]
        errors = compare(ours, ref)
        parity_table[family, topology] = max(errors[phase] for phase in ("logits", "loss", "gradients", "grad_norm"))
        assert parity_table[family, topology] <= LIMIT, errors
