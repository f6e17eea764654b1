"""Clipping and the optimizer's step, from the gradients that a trainer had: by torch's own optimizer, in float64."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora_judge.recording.files import Step
from meshlora_judge.steps.verdict import Finding, Verdict

# How far a gradient may be from itself times a number, by its dtype.
_SAME = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_LOW = (torch.bfloat16, torch.float16)
_FURTHER = 0.1
_BETAS_1, _BETAS_2 = (0.9, 0.95, 0.8, 0.0), (0.999, 0.99, 0.98, 0.95, 0.9)
_ADAM_F32 = 1e-4  # torch's fused and foreach forms round differently
# Ways to run one formula faster, or on devices only: the judge takes none of them.
_FORMS = ("foreach", "fused", "capturable", "differentiable")


def judge_clipping(verdict: Verdict, number: int, rank: int, step: Step) -> None:
    """The optimizer took the gradients, each times one number: min(1, max_norm / (norm + 1e-6))."""
    names, squares = list[str](), 0.0
    for name, value in step.raw.items():
        if name in step.clipped:
            names.append(name)
            squares += float(value.double().square().sum())
    if not names:
        return
    norm = math.sqrt(squares)
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
    if not step.clip and is_clamped(step.clipped, step.raw):
        limits = {float(step.clipped[name].abs().max()) for name in wrong}
        if len(limits) == 1:  # torch's clip_grad_value_
            verdict.notes.append(f"gradients are clipped by value, to {limits.pop():.4g}")
            return
        words = f"each parameter by a limit of its own, {min(limits):.4g} to {max(limits):.4g}"
        verdict.findings.append(Finding(number, "clipping", "clipped by value", words, tuple(wrong), (rank,)))
        return
    cause, words = _of_clipping(step, factors, factor, norm)
    verdict.findings.append(Finding(number, "clipping", cause, words, tuple(wrong), (rank,)))


def is_clamped(taken: Mapping[str, Tensor], raw: Mapping[str, Tensor]) -> bool:
    """Whether every gradient is the raw one, held between two opposite values."""
    for name, value in taken.items():
        largest = float(value.abs().max())
        if not largest or name not in raw or not torch.equal(value, raw[name].clamp(-largest, largest)):
            return False
    return True


def _of_clipping(step: Step, factors: list[float], expected: float, norm: float) -> tuple[str, str]:
    middle = sum(factors) / len(factors)
    if _furthest(factors, middle) > 1e-2 * abs(middle):
        return "clipped unequally", f"parameters are multiplied by {min(factors):.4g} to {max(factors):.4g}"
    if not step.clip:
        words = (
            f"between backward and step it was multiplied by {middle:.4g}, and no clip_grad_norm_ was seen; of a loop "
            "that clips by code of its own say record(max_norm=...)"
        )
        return "changed before the step", words
    if abs(middle - 1) < 1e-2:
        return "not clipped", f"clipping was called, it was to be multiplied by {expected:.4g}, and it was not"
    if middle and step.clip["max_norm"]:
        used = step.clip["max_norm"] / middle
        words = f"it was clipped by a norm of {used:.4g}, and the norm of all gradients is {norm:.4g}"
        if abs(used / norm - 1) > 1e-3:
            return "clipped by another norm", words
    return "changed before the step", f"it was multiplied by {middle:.4g}, and by clipping {expected:.4g} was due"


def _furthest(numbers: Sequence[float], middle: float) -> float:
    """How far from `middle` any of `numbers` is."""
    return max(max(numbers) - middle, middle - min(numbers))


def judge_update(verdict: Verdict, number: int, rank: int, step: Step) -> None:
    """The parameters moved as torch's optimizer of that class and these options moves them."""
    made = _stepped(step)
    if made is None:
        note = f"the update by {step.optimizer['class']} is not judged: it is no optimizer of torch"
        if note not in verdict.notes:
            verdict.notes.append(note)
        return
    wrong, still, elements = [], 0, 0
    further, far, low = 0.0, 0.0, []
    for name, expected in made.items():
        before, after = step.before[name].double(), step.after[name].double()
        due, done = expected - before, after - before
        size = float(due.norm())
        rounding = torch.finfo(step.before[name].dtype).eps * float(after.norm())
        # The movement is a difference of rounded values: of small ones rounding is the larger part.
        least = 1e-6 if step.before[name].dtype == torch.float64 else _ADAM_F32
        limit = max(least, 2 * rounding / max(size, 1e-300))
        error = float((done - due).norm()) / size if size else float(done.norm())
        if step.before[name].dtype in _LOW:
            rounded = expected.to(step.before[name].dtype).double()
            further += float(((after - rounded) * due).sum())
            far += float(((rounded - before) * due).sum())
            low.append(name)
        still += int(((done == 0) & (due != 0)).sum())
        elements += due.numel()
        if not verdict.compare("update", error, limit):
            wrong.append(name)
    # An element of low precision is known to half of its last bit, the movement of all of them together far better.
    if low and not wrong and far and not verdict.compare("update", abs(further / far), _FURTHER):
        wrong = low
    if elements and still > elements / 10:
        share = f"{100 * still / elements:.0f} % of the elements did not move: their updates were lost to rounding"
        verdict.notes.append(f"step {number + 1}: {share}")
    if wrong:
        cause, words = _of_update(step, wrong)
        verdict.findings.append(Finding(number, "update", cause, words, tuple(wrong), (rank,)))


def judge_state(verdict: Verdict, number: int, rank: int, ended: Step, step: Step) -> None:
    """A step begins with the state that the optimizer's step before it, `ended`, left."""
    made = _optimizer(ended)
    if made is None:
        return
    optimizer, values = made
    optimizer.step()
    wrong = []
    for name, value in values.items():
        # In low precision a state is rounded each time, and some optimizers keep a copy of it elsewhere.
        limit = 1e-1 if ended.before[name].dtype in _LOW else 1e-2
        found = step.optimizer["state"].get(name, {})
        for key, due in optimizer.state.get(value, {}).items():
            own = found.get(key)
            if not isinstance(due, Tensor) or not due.any():
                continue
            error = 1.0  # a state that is not there is all wrong
            if isinstance(own, Tensor):
                error = float((own.double() - due.double()).norm()) / float(due.double().norm())
            if not verdict.compare("state", error, limit):
                wrong.append(name)
                break
    if wrong:
        words = "the optimizer's state is not what its step before left"
        verdict.findings.append(Finding(number, "state", "state changed", words, tuple(wrong), (rank,)))


def _optimizer(step: Step, **other: Any) -> tuple[Any, dict[str, Tensor]] | None:
    """(torch's optimizer before its step, the parameters by name), in float64; None: it is none of torch's.

    other: options of its groups instead of those recorded, where they have them.
    """
    module, _, kind = step.optimizer["class"].rpartition(".")
    cls = None
    # By its module, too: an `AdamW` of another package may follow another formula.
    if f"{module}.".startswith("torch.optim."):
        cls = getattr(importlib.import_module("torch.optim"), kind, None)
    if cls is None:
        return None
    takes = inspect.signature(cls).parameters
    values: dict[str, Tensor] = {}
    groups = []
    for group in step.optimizer["groups"]:
        options = _options(group["options"], takes, other)
        if group["names"] and kind == "Adafactor" and options["eps"][0] is None:  # then it is the dtype's own
            options["eps"] = (torch.finfo(step.before[group["names"][0]].dtype).eps, options["eps"][1])
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
    return optimizer, values


def _stepped(step: Step, times: int = 1, **other: Any) -> dict[str, Tensor] | None:
    """Every parameter after a step of torch's optimizer, in float64; None: it is none of torch's."""
    made = _optimizer(step, **other)
    if made is None:
        return None
    optimizer, values = made
    for _ in range(times):
        optimizer.step()
    return {name: value.detach() for name, value in values.items()}


def _options(given: Mapping[str, Any], takes: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a group that the optimizer `takes`, with `other` in the place of some."""
    options = {}
    for key, value in given.items():
        if key in takes:
            options[key] = tuple(value) if isinstance(value, list) else value
    for key, value in other.items():
        # Only where the optimizer has it, and in that form: Adafactor's eps is a pair.
        if type(options.get(key)) is type(value):
            options[key] = value
    for key in _FORMS:
        if key in takes:
            options[key] = False
    return options


def _of_state(key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if key == "step" else value.double().clone()
    return value


def _of_update(step: Step, wrong: list[str]) -> tuple[str, str]:
    if _are_equal(step.before, step.after, wrong):
        without = _stepped(step, weight_decay=0.0) or {}
        if _are_equal(step.before, without, wrong):
            return "no weight decay", "only weight decay was to move it, and was left out"
        return "not stepped", "the optimizer stepped, and it did not move"
    for dtype in (torch.bfloat16, torch.float16):
        if _are_rounded(step.after, wrong, dtype):
            return "rounded", f"its new values are rounded to {str(dtype).removeprefix('torch.')}"
    if found := _of_rate(step, wrong):
        return found
    for key, words, other in _OTHERS:
        if _are_close(step, wrong, _stepped(step, **other) or {}):
            return key, words.format(*other.values())
    if _are_close(step, wrong, _stepped(step, times=2) or {}):
        return "stepped twice", "it moved as by two steps with the same gradients"
    return "another update", "it did not move as the optimizer's formula and state say"


def _are_equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: Sequence[str]) -> bool:
    return all(torch.equal(a[name].double(), b[name].double()) for name in names)


def _are_rounded(values: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype) -> bool:
    """Whether values of a finer type are those of the coarser `dtype`."""
    for name in names:
        value = values[name]
        if value.dtype.itemsize <= 2 or not torch.equal(value.to(dtype).to(value), value):
            return False
    return True


def _are_close(step: Step, names: Sequence[str], due: Mapping[str, Tensor]) -> bool:
    for name in names:
        error = float((step.after[name].double() - due[name]).norm())
        if not error <= _tolerance(step, name) * float((due[name] - step.before[name].double()).norm()):
            return False
    return True


# (key, words, options) of a step by other options than the groups have.
_OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("uphill", "it moved uphill, as with maximize={}", {"maximize": True}),
    *(("other betas", "it moved as with betas {}", {"betas": (one, two)}) for one in _BETAS_1 for two in _BETAS_2),
    *(("another eps", "it moved as with eps {}", {"eps": 10.0**-power}) for power in range(2, 17)),
    *(("another momentum", "it moved as with momentum {}", {"momentum": each}) for each in (0.0, 0.9, 0.99)),
]


def _of_rate(step: Step, wrong: list[str]) -> tuple[str, str] | None:
    """How many times too far it moved, and how far by weight decay: the optimizer's step is linear in both."""
    for name in wrong:
        for values in (step.before, step.after, step.clipped):
            if not bool(values[name].isfinite().all()):
                return None
    due, without = _stepped(step) or {}, _stepped(step, weight_decay=0.0) or {}
    found, decays = [], []
    for name in wrong:
        before = step.before[name].double()
        own, decay = without[name] - before, due[name] - without[name]
        done = step.after[name].double() - before
        # Without decay its column would be zero, and the fit could give it any number.
        columns = own.flatten()[:, None]
        if decay.any():
            columns = torch.stack([own.flatten(), decay.flatten()], 1)
        sizes = columns.norm(dim=0).clamp_min(1e-300)
        fit = torch.linalg.lstsq(columns / sizes, done.flatten()[:, None], driver="gelsd").solution[:, 0]
        gap = float((done.flatten() - (columns / sizes) @ fit).norm())
        if gap > _tolerance(step, name) * float(done.norm()):
            return None
        moved, *decayed = (fit / sizes).tolist()
        found.append(moved)
        decays += decayed
    least, most = min(found), max(found)
    if decays and _furthest(found, 1.0) < 1e-2:
        if max(map(abs, decays)) < 0.05:
            return "no weight decay", "weight decay was left out"
        words = f"weight decay is {min(decays):.4g} to {max(decays):.4g} times what its group says"
        return "another weight decay", words
    times = f"{least:.4g}"
    if most - least >= 1e-2 * abs(most):
        times += f" to {most:.4g}"
    return "another rate", f"it moved {times} times as far as the rate asks"


def _tolerance(step: Step, name: str) -> float:
    """How far a movement may be from a formula's, relative: rounding of the value itself counts."""
    moved = float((step.after[name].double() - step.before[name].double()).norm())
    rounding = torch.finfo(step.before[name].dtype).eps * float(step.after[name].double().norm())
    return max(1e-3, 2 * rounding / max(moved, 1e-300))
