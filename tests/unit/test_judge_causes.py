"""What the judge of other people's steps says of a sum, a clipping and an update: by tables, and by a few trials."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from meshlora_judge.recording.files import Step
from meshlora_judge.steps.causes import cause_of_sum
from meshlora_judge.steps.fit import combined, fitted
from meshlora_judge.steps.update import judge_clipping, judge_state, judge_update
from meshlora_judge.steps.verdict import Finding, Verdict
from tests.scripts import ROOT

# Two ranks with two micro-batches each, of so many trained tokens.
COUNTS, RANKS = [3, 5, 4, 12], [0, 0, 1, 1]
TOTAL = sum(COUNTS)
SHARES: dict[str, list[float]] = {
    "not summed over ranks": [2, 2, 0, 0],
    "one rank's only": [0, 0, 1, 1],
    "lost accumulation": [0, 1, 0, 1],
    "left out": [1, 0, 1, 1],
    "not at all": [2, 0, 1, 1],
    "counted twice": [1, 2, 1, 1],
    "scaled": [3, 3, 3, 3],
    "mean of means": [TOTAL / (4 * count) for count in COUNTS],
    "mean of ranks' means": [TOTAL / (2 * 8)] * 2 + [TOTAL / (2 * 16)] * 2,
    "divided by all positions": [TOTAL / 60] * 4,
    "zero": [0, 0, 0, 0],
}


@pytest.mark.parametrize("key", SHARES)
def test_shares_of_micro_batches_name_the_mistake(key: str) -> None:
    coefficients = [share / TOTAL for share in SHARES[key]]
    cause = cause_of_sum(coefficients, COUNTS, RANKS, 0, limit=1e-3, positions=[15] * 4)
    assert cause is not None
    if key == "not at all":
        assert cause.key == "counted twice"
        assert key in cause.words
    else:
        assert cause.key == key


@pytest.mark.parametrize(
    ("ratio", "micro", "key"),
    [
        (2.0, 3, "summed, not averaged"),
        (0.5, 3, "averaged twice"),
        (3.0, 3, "accumulation not divided"),
        (1 / 3, 3, "accumulation divided twice"),
    ],
)
def test_a_ratio_is_the_number_of_ranks_or_of_micro_batches(ratio: float, micro: int, key: str) -> None:
    counts, ranks = [*range(2, 2 + 2 * micro)], [0] * micro + [1] * micro
    cause = cause_of_sum([ratio / sum(counts)] * len(counts), counts, ranks, 0, limit=1e-3)
    assert cause is not None
    assert (cause.key, cause.ratio) == (key, pytest.approx(ratio))


def test_a_rank_without_trained_tokens_is_a_rank() -> None:
    cause = cause_of_sum([0.0, 0.5 / 4], [0, 4], [0, 1], 0, limit=1e-3)
    assert cause is not None
    assert cause.key == "averaged twice"


def test_a_right_sum_has_no_cause_whatever_a_micro_batch_without_tokens_has() -> None:
    assert cause_of_sum([1 / 7, 5.0, 1 / 7], [3, 0, 4], [0, 0, 1], 0, limit=1e-3) is None


def test_a_coefficient_is_known_far_better_than_an_element() -> None:
    generator = torch.Generator().manual_seed(0)
    each = [{"w": torch.randn(64, 64, generator=generator, dtype=torch.float64)} for _ in range(3)]
    noise = 0.1 * torch.randn(64, 64, generator=generator, dtype=torch.float64)
    fit = fitted({"w": combined(each, [1, 2, 0.5])["w"] + noise}, each, ["w"])
    off = (fit.coefficients - torch.tensor([1, 2, 0.5], dtype=torch.float64)).abs()
    assert float((off / fit.spreads).max()) < 4
    assert float(fit.spreads.max()) < 0.1 / 50
    assert fit.residual > 0.04


# One step of torch's AdamW, as recorded.


def _step(options: dict[str, Any] | None = None, **differs: Any) -> Step:
    """A right step; `differs`: of the options that the optimizer really used."""
    generator = torch.Generator().manual_seed(1)
    names = ["a.lora_A.default.weight", "a.lora_B.default.weight"]
    values = {name: torch.randn(4, 6, generator=generator, dtype=torch.float64) for name in names}
    gradients = {name: torch.randn(4, 6, generator=generator, dtype=torch.float64) * 1e-2 for name in names}
    declared = {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1} | (options or {})
    step = Step(
        raw=gradients,
        clipped={name: value.clone() for name, value in gradients.items()},
        before=values,
        optimizer={
            "class": "torch.optim.adamw.AdamW",
            "groups": [{"options": declared, "names": names, "others": 0}],
            "state": {name: _state(gradients[name]) for name in names},
        },
    )
    parameters = [torch.nn.Parameter(value.clone()) for value in values.values()]
    used = declared | differs
    optimizer = torch.optim.AdamW(parameters, **(used | {"betas": tuple(used["betas"])}))
    for parameter, name in zip(parameters, names, strict=True):
        parameter.grad = gradients[name].clone()
        optimizer.state[parameter] = _state(gradients[name])
    optimizer.step()
    step.after = {name: parameter.detach() for name, parameter in zip(names, parameters, strict=True)}
    return step


def _state(gradient: Tensor) -> dict[str, Tensor]:
    return {"step": torch.tensor(3.0), "exp_avg": 0.5 * gradient.roll(1, 0), "exp_avg_sq": gradient.square() + 1e-6}


def _of_update(step: Step) -> list[Finding]:
    verdict = Verdict()
    judge_update(verdict, 0, 0, step)
    return verdict.findings


def test_the_optimizers_own_step_is_right() -> None:
    assert not _of_update(_step())


@pytest.mark.parametrize(
    ("differs", "cause"),
    [
        ({"weight_decay": 0.0}, "no weight decay"),
        ({"weight_decay": 0.3}, "another weight decay"),
        ({"lr": 2e-2}, "another rate"),
        ({"betas": [0.9, 0.95]}, "other betas"),
        ({"eps": 1e-3}, "another eps"),
    ],
)
def test_a_step_by_other_options_than_declared_is_named(differs: dict[str, Any], cause: str) -> None:
    (found,) = _of_update(_step(**differs))
    assert found.cause == cause


def test_values_that_something_else_changed_are_named() -> None:
    step = _step()
    rounded = dataclasses.replace(step, after={k: v.bfloat16().double() for k, v in step.after.items()})
    back = dataclasses.replace(step, after=dict(step.before))
    noise = dataclasses.replace(step, after={k: v + torch.rand_like(v) for k, v in step.after.items()})
    assert [_of_update(each)[0].cause for each in (rounded, back, noise)] == [
        "rounded",
        "not stepped",
        "another update",
    ]


def _of_clipping(step: Step) -> list[Finding]:
    verdict = Verdict()
    judge_clipping(verdict, 0, 0, step)
    return verdict.findings


@pytest.mark.parametrize(
    ("factors", "cause"),
    [((1.0, 1.0), "not clipped"), ((0.25, 0.25), "clipped by another norm"), ((0.5, 1.0), "clipped unequally")],
)
def test_clipping_is_by_the_norm_of_all_gradients(factors: tuple[float, float], cause: str) -> None:
    step = _step()
    norm = float(torch.cat([value.flatten() for value in step.raw.values()]).norm())
    step.clip = {"max_norm": norm / 2, "norm": norm, "calls": 1}
    step.clipped = {name: value * min(1.0, 0.5 * norm / (norm + 1e-6)) for name, value in step.raw.items()}
    assert not _of_clipping(step)
    step.clipped = {name: value * by for (name, value), by in zip(step.raw.items(), factors, strict=True)}
    (found,) = _of_clipping(step)
    assert found.cause == cause


@pytest.mark.parametrize("cause", ["", "clipped by value"])
def test_clipping_by_one_value_is_noted_and_by_many_a_fault(cause: str) -> None:
    step, verdict = _step(), Verdict()
    limits = [1e-3, 2e-3 if cause else 1e-3]
    for (name, value), limit in zip(step.raw.items(), limits, strict=True):
        step.clipped[name] = value.clamp(-limit, limit)
    judge_clipping(verdict, 0, 0, step)
    assert [found.cause for found in verdict.findings] == ([cause] if cause else [])
    assert bool(verdict.notes) is not bool(cause)


def test_a_state_that_did_not_come_from_the_step_before_is_seen() -> None:
    first = _step()
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in first.before.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    for name, parameter in parameters.items():
        parameter.grad = first.clipped[name].clone()
        optimizer.state[parameter] = _state(first.clipped[name])
    optimizer.step()
    state: dict[str, Any] = {name: dict(optimizer.state[parameter]) for name, parameter in parameters.items()}
    for lost, expected in ((False, []), (True, ["state changed"])):
        if lost:
            state = {name: {} for name in state}
        second = dataclasses.replace(first, optimizer=first.optimizer | {"state": state})
        verdict = Verdict()
        judge_state(verdict, 1, 0, first, second)
        assert [found.cause for found in verdict.findings] == expected


def test_the_finding_that_says_more_is_said_first() -> None:
    vague, known = Finding(0, "gradient", "unknown", "?"), Finding(1, "gradient", "left out", "rows are left out")
    assert Verdict(findings=[vague, known]).first is known
    assert Verdict(findings=[vague]).first is vague


@pytest.mark.long
def test_loops_of_others_are_proved_and_faults_in_them_named() -> None:
    words = [sys.executable, "scripts/judge_trials.py", "--slice", "3/14"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
