"""Every family that is listed as proved: each tensor against one-process transformers + peft.

By default each form of a plan once, on tp=2,sp, which has all that tp=2 has but for the borders; `make proof` has every
family, on both.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshlora.plan.derive import plan_model
from meshlora.verify.options import DROPOUT
from meshlora.verify.proof import Outcome
from meshlora.wings.proved.families import PROVED, PROVED_CONTEXT, PROVED_EXPERTS
from meshlora_ground.objective import Sft
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config

DENSE, WITH_EXPERTS = ("tp=2", "tp=2,sp"), ("tp=2,sp,ep=2", "tp=2,sp,etp=2")
# By default each once: what no family of `test_heads`, `test_experts` and the kill table has, of the forms that a plan
# gives a layer. The kill table has bloom, doge, gemma3, gpt2 and olmo2, `test_heads` attention and MLP side by side.
OFTEN = {
    "codegen": "q, v and k in four groups",
    "diffllama": "halves of heads that belong together, and small vectors that stay whole",
    "falcon_h1": "attention and state-space mixer side by side, a buffer that is split",
    "gemma4_unified_text": "keys that are values, keys and values of another layer",
    "lfm2": "a short convolution",
    "gpt_neox_japanese": "a bias that the layer adds",
    "granite_swa": "a parameter with a value per head",
    "minicpm3": "an attention of low rank",
    "modernbert-decoder": "a head of several modules",
    "moshi": "a linear in a module of its own",
    "mpt": "an argument with a dim of heads",
    "nanochat": "one norm in two places",
    "olmo_hybrid": "a delta net, norms over a width of key/value heads",
    "opt": "an MLP without a module of its own, a projection after the layers",
    "recurrent_gemma": "a recurrent unit",
    "xlstm": "nothing but the vocabulary split, with biases",
}
# Families whose layers have the same plan as those of another: it -> them.
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
WITHOUT_SP = ("mpt",)


def _check(outcomes: list[Outcome]) -> None:
    assert outcomes
    for outcome in outcomes:
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "topologies"),
    [
        *((name, DENSE if name in WITHOUT_SP else DENSE[1:]) for name in OFTEN),
        *(
            pytest.param(name, DENSE[:1] if name in OFTEN else DENSE, marks=pytest.mark.proof)
            for name in sorted(PROVED - PROVED_EXPERTS - set(WITHOUT_SP))
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
    """So that what `make proof` finds of one of them is known of all."""
    expected = _plan(stand_in)
    for family in STANDS_FOR[stand_in]:
        assert _plan(family) == expected, family


# Besides those of `test_experts`: mixers beside experts, experts without a gate.
OFTEN_WITH_EXPERTS = {"minimax": "tp=2,sp,ep=2", "nemotron_h": "tp=2,sp,etp=2"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "topologies"),
    [
        *((name, (topology,)) for name, topology in OFTEN_WITH_EXPERTS.items()),
        *(
            pytest.param(
                name, tuple(t for t in WITH_EXPERTS if t != OFTEN_WITH_EXPERTS.get(name)), marks=pytest.mark.proof
            )
            for name in sorted(PROVED_EXPERTS)
        ),
    ],
)
def test_family_with_experts_matches_one_process(
    family: str, topologies: tuple[str, ...], prove_and_note: Callable[..., list[Outcome]]
) -> None:
    """With the adapter on its experts too."""
    _check(prove_and_note(family=family, topologies=topologies, steps=1))


@pytest.mark.proof
@pytest.mark.parametrize("family", sorted(PROVED_CONTEXT))
def test_family_on_cut_sequences_matches_one_process(family: str, prove_and_note: Callable[..., list[Outcome]]) -> None:
    """By default `tests/verify/test_context.py` has each way in which tokens see each other."""
    options: dict[str, Any] = {"topologies": ("cp=2", "cp=2,ep=2")}
    if family not in PROVED_EXPERTS:
        options = {"topologies": ("cp=2",), "default_dropout": DROPOUT, "objective": Sft(label_smoothing=0.1)}
    _check(prove_and_note(family=family, steps=1, **options))


def test_families_that_are_always_run_are_proved() -> None:
    assert OFTEN_WITH_EXPERTS.keys() <= PROVED_EXPERTS
    assert set(WITHOUT_SP) <= OFTEN.keys()
    alike = {name for names in STANDS_FOR.values() for name in names}
    assert STANDS_FOR.keys() | alike | OFTEN.keys() <= PROVED - PROVED_EXPERTS
