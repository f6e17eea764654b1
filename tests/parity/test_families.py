"""Every family that is listed as proved: each tensor against one-process transformers + peft.

By default one family of each plan, on tp=2,sp, which has all that tp=2 has but for the borders; `make proof` has every
family, on both.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshlora.config.objective import Sft
from meshlora.plan.derive import plan_model
from meshlora.plan.families.proved import PROVED, PROVED_EXPERTS
from meshlora.plan.families.twin import twin_config
from meshlora.plan.topology import Topology
from meshlora.verify.proof import Outcome
from meshlora.verify.request import DROPOUT

DENSE, WITH_EXPERTS = ("tp=2", "tp=2,sp"), ("tp=2,sp,ep=2", "tp=2,sp,etp=2")
# A family that stands for others by default -> those whose layers have the same plan.
STANDS_FOR = {
    "apertus": ("arcee",),
    "cohere": (
        *("cohere2", "cohere_compass_text", "cwm", "ernie4_5", "gemma", "gemma2", "gemma3_text", "granite", "helium"),
        *("hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "llama", "ministral", "ministral3", "mistral"),
        *("olmo", "qwen3", "smollm3", "vaultgemma"),
    ),
    "glm": ("glm4",),
    "gpt2": ("gpt-sw3",),
    "olmo2": ("olmo3",),
    "qwen3_5": ("qwen3_5_text",),
}
# Where a block is kept whole, or is entered or left in a way of its own, tp=2 too.
WITHOUT_SP = ("gemma4_unified_text", "minicpm3", "moshi", "mpt", "qwen3_5", "recurrent_gemma")
_ALIKE = {name: stand_in for stand_in, names in STANDS_FOR.items() for name in names}


def _check(outcomes: list[Outcome]) -> None:
    assert outcomes
    for outcome in outcomes:
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.parametrize(
    ("family", "topologies"),
    [
        *(
            (name, DENSE if name in WITHOUT_SP else DENSE[1:])
            for name in sorted(PROVED - PROVED_EXPERTS - _ALIKE.keys())
        ),
        *(pytest.param(name, DENSE, marks=pytest.mark.proof) for name in sorted(_ALIKE)),
        *(
            pytest.param(name, DENSE[:1], marks=pytest.mark.proof)
            for name in sorted(PROVED - PROVED_EXPERTS - _ALIKE.keys() - set(WITHOUT_SP))
        ),
    ],
)
def test_family_matches_one_process(
    family: str, topologies: tuple[str, ...], prove_and_note: Callable[..., list[Outcome]]
) -> None:
    """With what `meshlora verify` has by itself: dropout and label smoothing."""
    options = {"default_dropout": DROPOUT, "objective": Sft(label_smoothing=0.1)}
    _check(prove_and_note(family=family, topologies=topologies, steps=1, **options))


def _plan(family: str) -> list[str]:
    """Of its layers on tp=2,sp, in words, without their numbers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(twin_config(family))
    plan = plan_model(model, Topology.parse("tp=2,sp"))
    fields = [f.name for f in dataclasses.fields(plan) if f.name not in ("model_type", "topology")]
    return [re.sub(r"\.\d+\.", ".N.", f"{name}: {getattr(plan, name)}") for name in fields]


@pytest.mark.parametrize("stand_in", STANDS_FOR)
def test_family_that_stands_for_others_has_their_plan(stand_in: str) -> None:
    expected = _plan(stand_in)
    for family in STANDS_FOR[stand_in]:
        assert _plan(family) == expected, family


# Besides those of `test_experts`. Between them: shared experts, latent attention, mixers, experts without a gate.
OFTEN = {
    **dict.fromkeys(("ernie4_5_moe", "glm4_moe", "minimax", "olmoe", "qwen3_next"), "tp=2,sp,ep=2"),
    **dict.fromkeys(("deepseek_v2", "jamba", "nemotron_h", "phimoe"), "tp=2,sp,etp=2"),
}


@pytest.mark.parametrize(
    ("family", "topologies"),
    [
        *((name, (topology,)) for name, topology in OFTEN.items()),
        *(
            pytest.param(name, tuple(t for t in WITH_EXPERTS if t != OFTEN.get(name)), marks=pytest.mark.proof)
            for name in sorted(PROVED_EXPERTS)
        ),
    ],
)
def test_family_with_experts_matches_one_process(
    family: str, topologies: tuple[str, ...], prove_and_note: Callable[..., list[Outcome]]
) -> None:
    """With the adapter on its experts too."""
    _check(prove_and_note(family=family, topologies=topologies, steps=1))


def test_families_that_are_always_run_are_proved() -> None:
    assert OFTEN.keys() <= PROVED_EXPERTS
    assert STANDS_FOR.keys() | _ALIKE.keys() | set(WITHOUT_SP) <= PROVED - PROVED_EXPERTS
