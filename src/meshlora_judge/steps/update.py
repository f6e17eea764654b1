"""Clipping and the optimizer's step, from the gradients that a trainer had: by torch's own optimizer, in float64."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshlora_judge.recording.files import Step
from meshlora_judge.steps.verdict import Finding, Verdict

# How far a gradient may be from itself times a number, by its dtype.
_SAME = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_ADAM_F32 = 1e-4  # torch's fused and foreach forms round differently


def judge_clipping(verdict: Verdict, number: int, rank: int, step: Step) -> None:
    """The optimizer took the gradients, each times one number: min(1, max_norm / (norm + 1e-6))."""
    names = [name for name in step.raw if name in step.clipped]
    if not names:
        return
    norm = math.sqrt(sum(float(step.raw[name].double().square().sum()) for name in names))
    factor = 1.0
    if step.clip and step.clip["max_norm"] > 0:
        factor = min(1.0, step.clip["max_norm"] / (norm + 1e-6))
    wrong, factors = [], []
    for name in names:
        raw, clipped = step.raw[name].double(), step.clipped[name].double()
        size = float(raw.norm())
        error = float((clipped - raw * factor).norm()) / (size * factor) if size else 0.0
        if not verdict.compare("clipping", error, _SAME.get(step.raw[name].dtype, 1e-5)):
            wrong.append(name)
            factors.append(float((clipped * raw).sum() / raw.square().sum().clamp_min(1e-300)))
    if not wrong:
        return
    cause, words = _of_clipping(step, factors, factor, norm)
    verdict.findings.append(Finding(number, "clipping", cause, words, tuple(wrong), (rank,)))


def _of_clipping(step: Step, factors: list[float], expected: float, norm: float) -> tuple[str, str]:
    middle = sum(factors) / len(factors)
    if max(abs(each - middle) for each in factors) > 1e-3 * abs(middle):
        return "clipped unequally", f"parameters are multiplied by {min(factors):.4g} to {max(factors):.4g}"
    if not step.clip:
        words = f"between backward and step it was multiplied by {middle:.4g}, and no clip_grad_norm_ was seen"
        return "changed before the step", words
    if middle and step.clip["max_norm"]:
        used = step.clip["max_norm"] / middle
        words = f"it was clipped by a norm of {used:.4g}, and the norm of all gradients is {norm:.4g}"
        if abs(used / norm - 1) > 1e-3:
            return "clipped by another norm", words
    return "changed before the step", f"it was multiplied by {middle:.4g}, and by clipping {expected:.4g} was due"


def judge_update(verdict: Verdict, number: int, rank: int, step: Step) -> None:
    """The parameters moved as torch's optimizer of that class and these options moves them."""
    made = _stepped(step)
    if made is None:
        note = f"the update by {step.optimizer['class']} is not judged: it is no optimizer of torch"
        if note not in verdict.notes:
            verdict.notes.append(note)
        return
    wrong, still, elements, ratios = [], 0, 0, []
    for name, expected in made.items():
        before, after = step.before[name].double(), step.after[name].double()
        due, done = expected - before, after - before
        size = float(due.norm())
        rounding = torch.finfo(step.before[name].dtype).eps * float(after.norm())
        limit = max(1e-6 if step.before[name].dtype == torch.float64 else _ADAM_F32, 2 * rounding / max(size, 1e-300))
        error = float((done - due).norm()) / size if size else float(done.norm())
        still += int(((done == 0) & (due != 0)).sum())
        elements += due.numel()
        if not verdict.compare("update", error, limit):
            wrong.append(name)
            ratios.append(float((done * due).sum() / due.square().sum().clamp_min(1e-300)))
    if elements and still > elements / 10:
        share = f"{100 * still / elements:.0f} % of the elements did not move: their updates were lost to rounding"
        verdict.notes.append(f"step {number + 1}: {share}")
    if wrong:
        cause, words = _of_update(step, wrong, ratios)
        verdict.findings.append(Finding(number, "update", cause, words, tuple(wrong), (rank,)))


def _stepped(step: Step) -> dict[str, Tensor] | None:
    """Every parameter after a step of torch's optimizer, in float64; None: it is none of torch's."""
    module, _, kind = step.optimizer["class"].rpartition(".")
    if not module.startswith("torch.optim."):
        return None
    cls = getattr(importlib.import_module("torch.optim"), kind, None)
    if cls is None:
        return None
    known = inspect.signature(cls).parameters
    values: dict[str, Tensor] = {}
    groups = []
    for group in step.optimizer["groups"]:
        options = {key: _of_group(value) for key, value in group["options"].items() if key in known}
        options |= {key: False for key in ("foreach", "fused", "capturable", "differentiable") if key in known}
        parameters = []
        for name in group["names"]:
            value = torch.nn.Parameter(step.before[name].double().clone())
            if name in step.clipped:
                value.grad = step.clipped[name].double().clone()
            values[name] = value
            parameters.append(value)
        if parameters:
            groups.append({"params": parameters, **options})
    optimizer = cls(groups)
    for name, state in step.optimizer["state"].items():
        optimizer.state[values[name]] = {key: _of_state(key, value) for key, value in state.items()}
    optimizer.step()
    return {name: value.detach() for name, value in values.items()}


def _of_group(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _of_state(key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if key == "step" else value.double().clone()
    return value


def _of_update(step: Step, wrong: list[str], ratios: list[float]) -> tuple[str, str]:
    if all(torch.equal(step.before[name], step.after[name]) for name in wrong):
        return "not stepped", "the optimizer stepped, and it did not move"
    middle = sum(ratios) / len(ratios)
    due = _without(step, "weight_decay")
    if due and all(_close(step, name, due[name]) for name in wrong):
        return "no weight decay", "weight decay was left out"
    if max(abs(each - middle) for each in ratios) < 1e-3 * abs(middle):
        return "another rate", f"it moved {middle:.4g} times as far as the rate asks"
    return "another update", "it did not move as the optimizer's formula and state say"


def _without(step: Step, option: str) -> Mapping[str, Tensor]:
    groups = [group | {"options": group["options"] | {option: 0.0}} for group in step.optimizer["groups"]]
    changed = Step(**(vars(step) | {"optimizer": step.optimizer | {"groups": groups}}))
    return _stepped(changed) or {}


def _close(step: Step, name: str, expected: Tensor) -> bool:
    due = expected - step.before[name].double()
    return float((step.after[name].double() - expected).norm()) <= 1e-3 * float(due.norm())
