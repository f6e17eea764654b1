"""Every family that is listed as proved: each tensor against one-process transformers + peft."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshlora.config.objective import Sft
from meshlora.plan.families import PROVED, PROVED_EXPERTS
from meshlora.verify.proof import Outcome
from meshlora.verify.request import DROPOUT


def _check(outcomes: list[Outcome]) -> None:
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.parametrize("family", sorted(PROVED - PROVED_EXPERTS))
def test_family_matches_one_process(family: str, prove_and_note: Callable[..., list[Outcome]]) -> None:
    """With what `meshlora verify` has by itself: dropout and label smoothing."""
    options = {"default_dropout": DROPOUT, "objective": Sft(label_smoothing=0.1)}
    _check(prove_and_note(family=family, topologies=("tp=2", "tp=2,sp"), steps=1, **options))


# Besides those of `test_experts`. Between them: shared experts, latent attention, mixers, experts without a gate.
OFTEN = ("deepseek_v2", "ernie4_5_moe", "glm4_moe", "jamba", "minimax", "nemotron_h", "olmoe", "phimoe", "qwen3_next")


@pytest.mark.parametrize(
    "family",
    [*OFTEN, *(pytest.param(name, marks=pytest.mark.proof) for name in sorted(PROVED_EXPERTS - set(OFTEN)))],
)
def test_family_with_experts_matches_one_process(family: str, prove_and_note: Callable[..., list[Outcome]]) -> None:
    """With the adapter on its experts too."""
    _check(prove_and_note(family=family, topologies=("tp=2,sp,ep=2", "tp=2,sp,etp=2"), steps=1))


def test_families_that_are_always_run_are_proved() -> None:
    assert set(OFTEN) <= PROVED_EXPERTS
