"""The mismatch between trainer and engine of a step is that of all its tokens, on any rank and in any micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshlora.comm.groups import open_mesh
from meshlora.run.formulas.policies import policy
from meshlora.run.formulas.seen import Seen
from meshlora.run.mismatch import mismatch_sums, with_mismatch
from meshlora.run.objectives import _total
from meshlora.run.step_sums import StepSums
from meshlora.train.batch import Batch
from meshlora_ground.objective import Objective
from meshlora_ground.objectives.policies import Grpo
from meshlora_ground.topology import Topology
from tests.pool import Pool

CAP, DP, NUM_BATCHES, SHAPE = 1.3, 2, 2, (3, 7)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """Old and engine's log-probabilities and which tokens are trained, `[rank, micro-batch, B, S]`; some have no
    engine. The last micro-batch of rank 1 is a dummy."""
    generator = torch.Generator().manual_seed(3)
    shape = (DP, NUM_BATCHES, *SHAPE)
    old = -torch.rand(shape, generator=generator, dtype=torch.float64) * 3
    engine = old + 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    engine[0, 1, 2] = torch.nan
    is_trained = torch.rand(shape, generator=generator) < 0.6
    is_trained[..., 0] = True
    return old, engine, is_trained


def reported(objective: Objective) -> dict[str, float]:
    """On each of two dp ranks: what a step of two micro-batches reports."""
    mesh = open_mesh(Topology(dp=DP))
    sums, (old, engine, is_trained) = StepSums(mesh, [""]), (each[mesh.rank] for each in drawn())
    for number in range(NUM_BATCHES):
        is_dummy = (mesh.rank, number) == (1, 1)
        rows = slice(0, 0) if is_dummy else slice(None)
        of_tokens = {"advantage": old, "old_log_prob": old, "engine_log_prob": engine, "weight": torch.ones_like(old)}
        columns = {name: column[number][rows] for name, column in of_tokens.items()}
        trained = is_trained[number][rows]
        log_p = torch.zeros_like(columns["old_log_prob"])
        losses, values = policy(objective, Seen(log_p, None, trained, columns, True))  # type: ignore[arg-type]
        own = {name: _total(name, value) for name, value in values.items()}
        num = int(trained.sum())
        ids = torch.zeros(1, 1, dtype=torch.int64)
        sums.add(
            0, Batch(ids, ids, ids, num, ids), num if objective.per == "token" else len(trained), losses.sum(), own
        )
    totals = torch.tensor([float(_number(objective))], dtype=torch.float64)
    (result,) = sums.read(totals, torch.zeros(1, dtype=torch.float64), is_asked=False)
    return result.means


def _number(objective: Objective) -> int:
    """Tokens or records of the step, without the dummy's."""
    is_trained = drawn()[2]
    is_trained[1, 1] = False
    return int(is_trained.sum()) if objective.per == "token" else SHAPE[0] * 3


@pytest.mark.parametrize("mean_over", ["token", "sequence"])
def test_mismatch_is_of_all_tokens_of_the_step(mean_over: Any, pools: Callable[[int], Pool]) -> None:
    found = pools(DP).run(reported, Grpo(importance_cap=CAP, mean_over=mean_over))
    old, engine, is_trained = (each.numpy() for each in drawn())
    is_trained[1, 1] = False
    known = is_trained & ~np.isnan(engine)
    gap = (old - engine)[known]
    # A mean over sequences weighs a token by one over the length of its sequence.
    share = (
        (known / np.maximum(is_trained.sum(-1, keepdims=True), 1))[known] if mean_over == "sequence" else 1 + 0 * gap
    )
    mean = lambda values: float((share * values).sum() / share.sum())  # noqa: E731
    weight = np.exp(gap)
    expected = {
        "engine_gap": mean(abs(gap)),
        "largest_engine_gap": abs(gap).max(),
        "engine_kl": mean(weight - 1 - gap),
        "effective_samples": mean(weight) ** 2 / mean(weight**2),
        "engine_truncated": mean(weight > CAP),
    }
    assert 0 < expected["engine_truncated"] < 1
    for means in found:
        assert {name: means[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_nothing_is_said_of_an_engine_that_is_not_known() -> None:
    unknown = torch.full((2, 3), torch.nan)
    sums = mismatch_sums(torch.zeros(2, 3), unknown, torch.zeros(2, 3).bool())
    assert with_mismatch({"ratio": 1.0} | {name: float(value.sum()) for name, value in sums.items()}) == {"ratio": 1.0}
