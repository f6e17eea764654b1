"""The gradients of one step against those of its micro-batches, and why they differ.

Owns: their limits and weights, and the order in which causes are looked for: a sum of the micro-batches' gradients, of
these and what was left from before, of those of a known mistake, and what one parameter's gradient is by its own look.
Does not own: words for a sum (`steps.causes`), the mistakes (`steps.losses`, `steps.reference`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshlora_judge.recording.files import Step
from meshlora_judge.steps import causes
from meshlora_judge.steps.causes import Cause, cause_of_sum, known
from meshlora_judge.steps.fit import combined, fitted
from meshlora_judge.steps.losses import is_mean_of_micro_batches
from meshlora_judge.steps.ranks import DataRanks, MicroBatchOf, wholes
from meshlora_judge.steps.reference import Reference
from meshlora_judge.steps.update import is_clamped
from meshlora_judge.steps.verdict import Finding, Verdict

# Trainers compute norms, rotations and losses in float32 whatever their dtype: 1e-5 was measured in float64.
_EXACT = {"float64": 3e-5, "float32": 3e-5, "bfloat16": 1e-2, "float16": 2e-3}
_NOISE = 4.0
# What a combination may leave over, however coarse the arithmetic: beyond it anything fits.
_LEFT_OVER = 0.25
# In low precision a coefficient may be off by so many standard errors, since rounding is not quite noise.
_SPREADS = 8.0

Gradients = Mapping[str, Tensor]


@dataclass
class Observed:
    """What one rank had.

    Attributes:
        found: the gradients that are judged. left: those before the step's first forward; empty as a rule.
        previous: the right ones of the step before. clips: how often clipping was called.
    """

    found: Gradients
    left: Gradients = field(default_factory=dict)
    previous: Gradients = field(default_factory=dict)
    clips: int = 0


class Judged:
    """The right gradients of one step, and their limits.

    Attributes:
        right: parameter -> its gradient. limits: parameter -> how far one may be from it.
    """

    def __init__(
        self,
        verdict: Verdict,
        reference: Reference,
        ranks: DataRanks,
        number: int,
        micro: Sequence[MicroBatchOf],
        before: Gradients,
    ) -> None:
        self.verdict, self.reference, self.ranks, self.number = verdict, reference, ranks, number
        self.micro, self.before = micro, before
        self.each, self.counts = reference.gradients(before, micro)
        self.right = combined(self.each, self._weights())
        self.low = combined(reference.rounded_gradients(before, micro), self._weights())
        self.limits = self._limits()

    def _weights(self) -> list[float]:
        """The right coefficient of each micro-batch."""
        if is_mean_of_micro_batches(self.reference.loss):
            return [1 / (len(self.micro) * max(count, 1)) for count in self.counts]
        return [1 / max(sum(self.counts), 1)] * len(self.micro)

    def _limits(self) -> dict[str, float]:
        others = [self.low]
        if self.reference.precision != torch.float64:
            others.append(combined(self.reference.row_by_row(self.before, self.micro), self._weights()))
        found = {}
        for name, whole in self.right.items():
            noise = 0.0
            for other in others:
                error = relative(other[name], whole)
                # Not finite: rows that are all padding, in float32's softmax of float64.
                if math.isfinite(error):
                    noise += error
            found[name] = max(_EXACT[self.reference.dtype_of(name)], _NOISE * noise)
        return found

    def _left_over(self, names: Iterable[str]) -> float:
        """The largest residual of a combination that is one."""
        return min(2 * self._widest(names), _LEFT_OVER)

    def _widest(self, names: Iterable[str]) -> float:
        """The limit of the coarsest of `names`: what is said of all of them can be no finer."""
        return max(self.limits[name] for name in names)

    def of_steps(self, steps: Sequence[Step]) -> list[Gradients]:
        """The gradients of each rank that are to be right.

        Those before clipping; where no clipping was seen, those that the optimizer took, as loops of their own sum over
        ranks or unscale after the last backward: but for a number that all of them are multiplied by.
        """
        raw, taken, is_clipped = list[Gradients](), list[Gradients](), False
        for step in steps:
            # Each stands in for the other, where the recorder saw only one of them.
            raw.append(step.raw or step.clipped)
            taken.append(step.clipped or step.raw)
            is_clipped = is_clipped or bool(step.clip)
        if is_clipped:
            return raw
        # A loop that clips by code of its own: the raw ones are right, and what it took is made of them.
        is_right = not any(map(self._wrong, self._wholes(raw)))
        if is_right and (all(map(_is_multiple, taken, raw)) or all(map(is_clamped, taken, raw))):
            return raw
        return taken

    def _wholes(self, ranks: Sequence[Gradients]) -> list[dict[str, Tensor]]:
        found = [dict[str, Tensor]() for _ in ranks]
        for name, shape in self.reference.shapes.items():
            copies = wholes([each.get(name) for each in ranks], shape) or []
            for own, copy in zip(found, copies, strict=False):
                if copy is not None:
                    own[name] = copy
        return found

    def _wrong(self, own: Gradients) -> dict[str, float]:
        """Parameter -> its error, where that is beyond its limit."""
        found = {}
        for name, value in own.items():
            error = relative(value, self.right[name])
            if error > self.limits[name]:
                found[name] = error
        return found

    def judge(self, ranks: Sequence[Observed]) -> None:
        """Compare those of every rank; of ranks with equal ones the first."""
        wrong: dict[int, dict[str, Tensor]] = {}
        seen = list[dict[str, Tensor]]()
        for rank, own in enumerate(self._wholes([each.found for each in ranks])):
            if any(_same(own, other) for other in seen):
                continue
            seen.append(own)
            for name, value in own.items():
                self.verdict.compare("gradient", relative(value, self.right[name]), self.limits[name])
            if bad := self._wrong(own):
                wrong[rank] = {name: own[name] for name in bad}
            elif cause := self._by_shares(own, rank, ranks[rank]):
                said = Finding(self.number, "gradient", cause.key, cause.words, tuple(own), (rank,), ratio=cause.ratio)
                self.verdict.findings.append(said)
        grouped: dict[str, tuple[Cause, set[str], set[int], float]] = {}
        for rank, bad_ones in wrong.items():
            for name, cause in self._causes(bad_ones, rank, ranks[rank]).items():
                error = relative(bad_ones[name], self.right[name])
                _, names, of, worst = grouped.get(cause.key, (cause, set(), set(), 0.0))
                grouped[cause.key] = (cause, names | {name}, of | {rank}, max(worst, error))
        for cause, names, of, worst in sorted(grouped.values(), key=lambda each: -len(each[1])):
            places = (tuple(sorted(names)), tuple(sorted(of)))
            found = Finding(self.number, "gradient", cause.key, cause.words, *places, worst, cause.ratio)
            self.verdict.findings.append(found)

    def _by_shares(self, own: Gradients, rank: int, observed: Observed) -> Cause | None:
        """What is wrong with a sum whose parameters, each by itself, are within the coarse limits of low precision.

        Rounding errors of thousands of elements cancel in a coefficient: it is known far better than any element.
        """
        names, exact = list[str](), 0.0
        for name, whole in self.right.items():
            if name not in own or not bool(whole.any()):
                continue
            # Without the trainer's own rounding no limit of a coefficient is known.
            if not bool(self.low[name].isfinite().all()):
                return None
            names.append(name)
            exact = max(exact, _EXACT[self.reference.dtype_of(name)])
        if not names:
            return None
        fit, noise = fitted(own, self.each, names), fitted(self.low, self.each, names)
        due = torch.tensor(self._weights(), dtype=torch.float64)
        trained = torch.tensor(self.counts) > 0
        limits = _SPREADS * torch.maximum(fit.spreads, noise.spreads) + _NOISE * (noise.coefficients - due).abs()
        limits = limits / due + exact
        off = (fit.coefficients / due - 1).abs()
        worst = float((off / limits)[trained].max())
        self.verdict.compare("shares", worst, 1.0)
        if worst <= 1:
            return None
        return self._of_sum(fit.coefficients.tolist(), rank, float(limits[trained].max()) / 5, observed)

    def _causes(self, bad: Gradients, rank: int, observed: Observed) -> dict[str, Cause]:
        """Of every wrong parameter: one that all of them share, or one each."""
        if len(bad) > 1:
            cause = self._shared(bad, rank, observed)
            if cause is None or cause.key in ("scaled", "unknown"):  # by a number that no rule of sums explains
                cause = self._mistake(bad) or cause
            if cause is not None:
                return dict.fromkeys(bad, cause)
        found = {}
        for name, value in bad.items():
            cause = self._shared({name: value}, rank, observed)
            found[name] = cause or self._of_one(value, name) or self._disturbed({name: value})
        if len(bad) == 1 and next(iter(found.values())).key in causes.VAGUE:
            found |= dict.fromkeys(bad, self._mistake(bad) or next(iter(found.values())))
        return found

    def _shared(self, bad: Gradients, rank: int, observed: Observed) -> Cause | None:
        """What the step's sums say of `bad` together; None: no combination gives them."""
        is_zero = True
        for value in bad.values():
            # First of all: least squares would spread a NaN over every coefficient.
            if not bool(torch.isfinite(value).all()):
                return known("not finite")
            is_zero = is_zero and not bool(value.any())
        if is_zero:
            return known("zero")
        fit = fitted(bad, self.each, [*bad])
        if fit.residual <= self._left_over(bad):
            return self._of_sum(fit.coefficients.tolist(), rank, self._widest(bad), observed)
        for key, others in (("not cleared", observed.left), ("of the step before", observed.previous)):
            if not bad.keys() <= others.keys():
                continue
            fit = fitted(bad, [*self.each, others], [*bad])
            if fit.residual <= self._left_over(bad):
                return known(key)
        return None

    def _of_sum(self, coefficients: list[float], rank: int, limit: float, observed: Observed) -> Cause:
        tolerance = min(0.2, max(1e-3, 5 * limit))
        of, positions = list[int](), list[int]()
        for micro in self.micro:
            of.append(micro.rank)
            positions.append(micro.given["input_ids"].numel())
        own = self.ranks.of[rank]
        cause = cause_of_sum(coefficients, self.counts, of, own, limit=tolerance, positions=positions)
        if observed.clips > 1 and cause is not None and cause.ratio is None:
            return known("clipped before accumulation ended")
        return cause or Cause("unknown", f"the sum over micro-batches is right, but for {limit:.0e}")

    def _mistake(self, bad: Gradients) -> Cause | None:
        """A known mistake of the loss or the forward whose gradients fit."""
        limit, names = self._left_over(bad), [*bad]
        # Clearly better than the right micro-batches, or it is none: any columns fit a part of what is left.
        best, found = 0.7 * fitted(bad, self.each, names).residual, None
        for variant, words in self.reference.variants(self.micro):
            try:
                each = self.reference.gradients(self.before, self.micro, variant=variant)[0]
            except (RuntimeError, TypeError, ValueError):  # of a family whose forward does not take it
                continue
            if variant in causes.ADDED:
                each = [*self.each, *each]
            residual = fitted(bad, each, names).residual
            if residual <= limit and residual < best:
                best, found = residual, Cause(variant, words)
        if found is not None:
            return found
        for key in causes.NUMBERS:
            if number := self._number(key, bad, min(limit, best)):
                return Cause(key, f"it fits a forward in which {key} by {number:.4g}", number)
        return None

    def _number(self, key: str, bad: Gradients, limit: float) -> float | None:
        """By which number a scale or a temperature is off, by Newton's method on its logarithm; None: by none."""
        place, step = 0.0, 1e-3
        for _ in range(8):
            each = self.reference.gradients(self.before, self.micro, variant=f"{key} {math.exp(place)}")[0]
            if place and fitted(bad, each, [*bad]).residual <= limit:
                return math.exp(place)
            further = self.reference.gradients(self.before, self.micro, variant=f"{key} {math.exp(place + step)}")[0]
            here, there = combined(each, self._weights()), combined(further, self._weights())
            slope = {name: (there[name] - here[name]) / step for name in bad}
            own, by = fitted(bad, [here, slope], [*bad]).coefficients.tolist()
            move = by / own if own else 0.0
            place += max(-0.7, min(0.7, move))  # a factor of two at most: far from the root the slope misleads
            if not 0 < abs(place) < 4:
                return None
        return None

    def _of_one(self, value: Tensor, name: str) -> Cause | None:
        """What the gradient of one parameter is by its own look: a part of it, or that of another."""
        whole, limit = self.right[name], max(1e-3, min(2 * self.limits[name], 0.1))
        if part := _part_of(value, whole, max(1e-2, min(self.limits[name], 0.3))):
            return Cause("a shard", part)
        for other, its in self.right.items():
            if other != name and its.shape == value.shape and relative(value, its) < limit:
                return Cause("of another parameter", f"it is that of {other}")
        # Sorted, noise looks small: of coarse arithmetic an order says nothing.
        if self.limits[name] < 1e-3 and _sorted(value, whole) < 1e-3:
            return known("permuted")
        own = fitted({name: value}, [*self.each, self.before], [name])
        if own.residual <= self._left_over([name]):
            return known("a penalty on the weights")
        return None

    def _disturbed(self, bad: Gradients) -> Cause:
        """The right sum and a rest, or nothing that is known."""
        fit = fitted(bad, [{name: self.right[name] for name in bad}], [*bad])
        if fit.residual < 0.7 and abs(float(fit.coefficients[0]) - 1) < fit.residual:
            words = f"it is the right sum and a rest, {fit.residual:.2g} of it, which is of no micro-batch"
            return Cause("disturbed", f"{words}: noise, dropout, rounding, or another forward")
        return known("unknown")


def _same(a: Gradients, b: Gradients) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _sorted(a: Tensor, b: Tensor) -> float:
    return relative(a.double().flatten().sort().values, b.double().flatten().sort().values)


def _is_multiple(taken: Gradients, raw: Gradients) -> bool:
    """Whether all of `taken` are those of `raw` times one number."""
    if not taken.keys() <= raw.keys():
        return False
    # Wide, as both may be rounded to bfloat16: an exact limit is for `judge_clipping`, by dtype.
    return fitted(taken, [raw], [*taken]).residual < 2e-2


def _part_of(value: Tensor, whole: Tensor, limit: float) -> str:
    """In words, if rows or columns of `value` are zero and the others are those of `whole`."""
    for dim in range(value.ndim):
        others = [d for d in range(value.ndim) if d != dim]
        there = value.abs().sum(others) > 0 if others else value != 0
        if 0 < int(there.sum()) < len(there):
            kept = torch.nonzero(there).flatten()
            if relative(value.index_select(dim, kept), whole.index_select(dim, kept)) < limit:
                which = "rows" if dim == 0 else "columns"
                return f"{int(there.sum())} of its {len(there)} {which} are there, the others are zero"
    return ""


def relative(ours: Tensor, reference: Tensor) -> float:
    """Relative L2 distance; infinite if shapes differ or ours is not finite."""
    if ours.shape != reference.shape or not bool(torch.isfinite(ours).all()):
        return math.inf
    norm = float(reference.double().norm())
    gap = float((ours.double() - reference.double()).norm())
    if norm:
        return gap / norm
    # Beside a reference of zeros only zero is right.
    return math.inf if gap else 0.0
