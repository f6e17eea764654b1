"""Recorded steps against transformers and PEFT on one process: each step by itself, from the values that it began with.

Owns: the phases and their limits. Gradients: relative L2 distance of each parameter from the reference's, in float64,
where the trainer's own rounding allows it; in a lower precision the reference runs in it too, and the trainer may be
four times as far as that. Clipping and the update are judged from the gradients that the trainer had, so one fault is
not counted thrice. Does not own: causes (`steps.causes`), which parts make a whole (`steps.ranks`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshlora_ground.errors import UnsupportedError
from meshlora_judge.recording.files import Recording, Step
from meshlora_judge.steps import causes
from meshlora_judge.steps.causes import Cause, cause_of_sum
from meshlora_judge.steps.fit import combined, fitted
from meshlora_judge.steps.losses import is_mean_of_micro_batches
from meshlora_judge.steps.ranks import DataRanks, MicroBatchOf, data_ranks, wholes
from meshlora_judge.steps.reference import Reference
from meshlora_judge.steps.update import judge_clipping, judge_update
from meshlora_judge.steps.verdict import Finding, Verdict

# Trainers compute norms, rotations and losses in float32 whatever their dtype: 4e-7 was measured in float64.
_EXACT = {"float64": 1e-5, "float32": 3e-5, "bfloat16": 1e-2, "float16": 2e-3}
_NOISE = 4.0


def judge_steps(recordings: Sequence[Recording], base: str) -> Verdict:
    """The verdict on all recorded steps. Raises: UserError, UnsupportedError: it cannot be replayed."""
    verdict = Verdict(notes=sorted({note for recording in recordings for note in recording.notes}))
    ranks = data_ranks(recordings)
    _facts(verdict, recordings, ranks)
    if ranks.repeats:
        words = "it has the very rows of another rank, so all of them together train on one rank's share"
        verdict.findings.append(Finding(0, "rows", "same rows", words, ranks=ranks.repeats))
    reference = Reference(base, recordings[0])
    _judge_trained(verdict, recordings, reference)
    for step in range(len(recordings[0].steps)):
        _judge_step(verdict, recordings, ranks, reference, step)
    return verdict


def _facts(verdict: Verdict, recordings: Sequence[Recording], ranks: DataRanks) -> None:
    first = recordings[0]
    sharded = [name for name, lies in first.frozen.items() if lies["kind"] != "plain"]
    split = f"{len(sharded)} of {len(first.frozen)} frozen parameters are sharded" if sharded else "nothing is sharded"
    counted = f"{len(recordings)} processes, {ranks.number} with rows of their own" if len(recordings) > 1 else "one"
    verdict.facts |= {
        "processes": counted,
        "base": f"{split}; {first.wrapper or 'no wrapper'}",
        "trained": f"{len(first.trained)} parameters",
        "steps": f"{len(first.steps)}, loss {first.loss['kind']}",
    }


def _judge_trained(verdict: Verdict, recordings: Sequence[Recording], reference: Reference) -> None:
    """Every parameter that PEFT trains is trained, has a gradient, and is the optimizer's."""
    wanted = reference.wanted or {*recordings[0].trained}
    for recording in recordings:
        step = recording.steps[0]
        owned = {name for group in step.optimizer["groups"] for name in group["names"]}
        for found, cause, words in (
            ({*recording.trained}, "frozen", "frozen, though its adapter trains it"),
            (owned, "not in the optimizer", "it is trained, and no group of the optimizer has it"),
            ({*step.raw} | {*step.clipped}, "no gradient", "no gradient reached it"),
        ):
            missing = tuple(sorted(wanted - found))
            if missing:
                verdict.findings.append(Finding(0, "trained", cause, words, missing, (recording.rank,)))
                break
    verdict.compare("trained", 0.0, 1.0)


def _judge_step(
    verdict: Verdict, recordings: Sequence[Recording], ranks: DataRanks, reference: Reference, number: int
) -> None:
    steps = [recording.steps[number] for recording in recordings]
    _judge_between(verdict, recordings, number)
    known = len(verdict.findings)
    before = _copies(verdict, [step.before for step in steps], reference, number)
    micro = ranks.micro_batches(recordings, number)
    if not micro:
        raise UnsupportedError(f"step {number + 1}", "no forward of the model was seen", "record the model called")
    each, counts = reference.gradients(before, micro)
    rounded = reference.rounded_gradients(before, micro)
    judged = _Step(verdict, reference, ranks, number, micro, each, counts, rounded)
    if len(verdict.findings) == known:  # else each rank has gradients at a place of its own
        judged.gradients([step.raw or step.clipped for step in steps], before)
    _copies(verdict, [step.after for step in steps], reference, number)
    for rank, step in enumerate(steps):
        if rank == 0 or not _same_values(steps[0], step):
            judge_clipping(verdict, number, rank, step)
            judge_update(verdict, number, rank, step)


def _same_values(a: Step, b: Step) -> bool:
    return all(name in b.after and torch.equal(value, b.after[name]) for name, value in a.after.items())


def _judge_between(verdict: Verdict, recordings: Sequence[Recording], number: int) -> None:
    """A step begins with what the one before it ended with."""
    if not number:
        return
    for recording in recordings:
        ended, begins = recording.steps[number - 1].after, recording.steps[number].before
        changed = [name for name in ended if name in begins and not torch.equal(ended[name], begins[name])]
        verdict.compare("between", float(len(changed)), 0.5)
        if changed:
            words = "something else than the optimizer changed it after the step before"
            found = Finding(number, "between", "changed between steps", words, tuple(changed), (recording.rank,))
            verdict.findings.append(found)


def _copies(
    verdict: Verdict, values: Sequence[Mapping[str, Tensor]], reference: Reference, number: int
) -> dict[str, Tensor]:
    """Whole values of every trained parameter: rank 0's, where the ranks agree; where not, that is a finding."""
    found, drifted, lacking = dict[str, Tensor](), list[str](), list[str]()
    for name, shape in reference.shapes.items():
        copies = wholes([each.get(name) for each in values], shape)
        if copies is None or copies[0] is None:
            lacking.append(name)
            continue
        found[name] = copies[0]
        if any(copy is not None and not torch.equal(copy, copies[0]) for copy in copies):
            drifted.append(name)
    verdict.compare("replicas", float(len(drifted) + len(lacking)), 0.5)
    if lacking:
        shapes = {tuple(each[lacking[0]].shape) for each in values if lacking[0] in each}
        words = f"the ranks have parts of {sorted(shapes)}, which do not make the whole {reference.shapes[lacking[0]]}"
        verdict.findings.append(Finding(number, "replicas", "a shard", words, tuple(lacking)))
    if drifted:
        words = f"its copies have drifted apart: {len(values)} ranks train adapters of their own"
        verdict.findings.append(Finding(number, "replicas", "replicas drifted", words, tuple(drifted)))
    return found


class _Step:
    """The gradients of one step against those of its micro-batches."""

    def __init__(
        self,
        verdict: Verdict,
        reference: Reference,
        ranks: DataRanks,
        number: int,
        micro: Sequence[MicroBatchOf],
        each: list[dict[str, Tensor]],
        counts: list[int],
        rounded: list[dict[str, Tensor]] | None,
    ) -> None:
        self.verdict, self.reference, self.ranks, self.number = verdict, reference, ranks, number
        self.micro, self.each, self.counts = micro, each, counts
        self.right = combined(each, self._weights())
        self.limits = self._limits(rounded)

    def _weights(self) -> list[float]:
        """The right coefficient of each micro-batch."""
        if is_mean_of_micro_batches(self.reference.loss):
            return [1 / (len(self.micro) * max(count, 1)) for count in self.counts]
        return [1 / max(sum(self.counts), 1)] * len(self.micro)

    def _limits(self, rounded: list[dict[str, Tensor]] | None) -> dict[str, float]:
        low = combined(rounded, self._weights()) if rounded is not None else {}
        found = {}
        for name, whole in self.right.items():
            exact = _EXACT.get(self.reference.dtype_of(name), 1e-2)
            found[name] = max(exact, _NOISE * relative(low[name], whole)) if low else exact
        return found

    def gradients(self, raw: Sequence[Mapping[str, Tensor]], before: Mapping[str, Tensor]) -> None:
        """Compare those of every rank; of ranks with equal ones the first."""
        wrong: dict[int, dict[str, Tensor]] = {}
        seen = list[dict[str, Tensor]]()
        for rank in range(len(raw)):
            own = dict[str, Tensor]()
            for name, shape in self.reference.shapes.items():
                copies = wholes([each.get(name) for each in raw], shape)
                copy = copies[rank] if copies is not None else None
                if copy is not None:
                    own[name] = copy
            if any(own.keys() == other.keys() and all(torch.equal(own[n], other[n]) for n in own) for other in seen):
                continue
            seen.append(own)
            bad = {}
            for name, value in own.items():
                error = relative(value, self.right[name])
                if not self.verdict.compare("gradient", error, self.limits[name]):
                    bad[name] = value
            if bad:
                wrong[rank] = bad
        if wrong:
            self._name(wrong, before)

    def _name(self, wrong: Mapping[int, Mapping[str, Tensor]], before: Mapping[str, Tensor]) -> None:
        """Group the wrong parameters by cause, over ranks."""
        grouped: dict[str, tuple[Cause, set[str], set[int], float]] = {}
        for rank, bad in wrong.items():
            whole = self._cause(bad, [*bad], rank, before) if len(bad) > 1 else None
            for name, value in bad.items():
                cause = whole or self._cause({name: value}, [name], rank, before, may_vary=len(bad) == 1)
                assert cause is not None
                error = relative(value, self.right[name])
                _, names, ranks, worst = grouped.get(cause.key, (cause, set(), set(), 0.0))
                grouped[cause.key] = (cause, names | {name}, ranks | {rank}, max(worst, error))
        for cause, names, ranks, worst in sorted(grouped.values(), key=lambda each: -len(each[1])):
            found = Finding(
                self.number,
                "gradient",
                cause.key,
                cause.words,
                tuple(sorted(names)),
                tuple(sorted(ranks)),
                worst,
                cause.ratio,
            )
            self.verdict.findings.append(found)

    def _cause(
        self,
        bad: Mapping[str, Tensor],
        names: list[str],
        rank: int,
        before: Mapping[str, Tensor],
        *,
        may_vary: bool = True,
    ) -> Cause | None:
        """The cause that all of `names` share. None: none is known for more than one of them."""
        limit = max(self.limits[name] for name in names)
        if not all(bool(torch.isfinite(value).all()) for value in bad.values()):
            return Cause("not finite", causes.CAUSES["not finite"])
        if not any(bool(value.any()) for value in bad.values()):
            return Cause("zero", causes.CAUSES["zero"])
        fit = fitted(bad, self.each, names)
        if fit.residual <= 2 * limit:
            return self._of_sum(fit.coefficients.tolist(), rank, limit)
        if may_vary and (found := self._variant(bad, names, rank, before, limit)):
            return found
        if len(names) > 1:
            return None
        return _of_one(bad[names[0]], names[0], self.right) or Cause("unknown", causes.CAUSES["unknown"])

    def _of_sum(self, coefficients: list[float], rank: int, limit: float) -> Cause:
        ranks = [micro.rank for micro in self.micro]
        own = self.ranks.of[rank]
        tolerance = min(0.2, max(1e-3, 5 * limit))
        return cause_of_sum(coefficients, self.counts, ranks, own, limit=tolerance) or Cause(
            "unknown", f"the sum over micro-batches is right, but for {limit:.0e}"
        )

    def _variant(
        self, bad: Mapping[str, Tensor], names: list[str], rank: int, before: Mapping[str, Tensor], limit: float
    ) -> Cause | None:
        """A known mistake of the loss or the forward whose gradients fit."""
        for variant, words in self.reference.variants(self.micro):
            each, _ = self.reference.gradients(before, self.micro, variant=variant)
            if any(name not in gradients for gradients in each for name in names):
                continue
            fit = fitted(bad, each, names)
            if fit.residual <= 2 * limit:
                return Cause(variant, words)
        return None


def _of_one(value: Tensor, name: str, right: Mapping[str, Tensor]) -> Cause | None:
    """What the gradient of one parameter is by its own look: a part of it, or that of another."""
    whole = right[name]
    if part := _part_of(value, whole):
        return Cause("a shard", part)
    for other, its in right.items():
        if other != name and its.shape == value.shape and relative(value, its) < 1e-3:
            return Cause("of another parameter", f"it is that of {other}")
    ratio = float((value.double() * whole).sum() / whole.square().sum().clamp_min(1e-300))
    if abs(ratio) > 1e-6 and relative(value, whole * ratio) < 1e-3:
        return Cause("scaled", f"it is {ratio:.4g} times the right one", ratio)
    return None


def _part_of(value: Tensor, whole: Tensor) -> str:
    """In words, if rows or columns of `value` are zero and the others are those of `whole`."""
    for dim in range(value.ndim):
        others = [d for d in range(value.ndim) if d != dim]
        there = value.abs().sum(others) > 0 if others else value != 0
        if 0 < int(there.sum()) < len(there):
            kept = torch.nonzero(there).flatten()
            if relative(value.index_select(dim, kept), whole.index_select(dim, kept)) < 1e-2:
                which = "rows" if dim == 0 else "columns"
                return f"{int(there.sum())} of its {len(there)} {which} are there, the others are zero"
    return ""


def relative(ours: Tensor, reference: Tensor) -> float:
    """Relative L2 distance; infinite if shapes differ or ours is not finite."""
    if ours.shape != reference.shape or not bool(torch.isfinite(ours).all()):
        return math.inf
    norm = float(reference.double().norm())
    gap = float((ours.double() - reference.double()).norm())
    return gap / norm if norm else (0.0 if not gap else math.inf)
