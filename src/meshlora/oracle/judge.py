"""The judge: two traces in, a verdict out. Each tensor by itself; nothing is averaged.

Owns: the phases, their limits, and what counts as equal. Does not own: the likely cause (`oracle.diagnose`), or how the
traces came about.

Limits come from precision. In float64 (lifted) the relative L2 distance of a tensor is at most 1e-11, of what AdamW
made of it 1e-6, as Adam divides by tiny moments. In a lower precision the reference runs in that precision too, and
ours may be as far from float64 as four times what the reference's own rounding makes: `max|ours - ref64| <= 4
max|ref_low - ref64|`. Of bfloat16 there are two such runs, as one process has two ways to train in it: with the adapter
computed in float32, and under autocast with the adapter computed in bfloat16, as ours is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshlora.oracle.inputs import expected_fresh
from meshlora.oracle.saved import CONFIG, FIRST, FRESH, LAST, WEIGHTS, Saved
from meshlora.oracle.trace import Trace
from meshlora.oracle.unshard import (
    Ownership,
    Piece,
    ShapeError,
    Tokens,
    canonical,
    factor_pieces,
    is_complete,
    sequences_of,
    sum_of,
    token_pieces,
)
from meshlora.plan.topology import Topology

# Phase -> what it is, in the order in which a fault shows first.
PHASES = {
    "sequences": "each sequence and token once",
    "loaded_adapter": "adapter as loaded",
    "forward": "output of every module",
    "logits": "logits",
    "loss": "loss of every step, and evaluated",
    "backward": "gradient of every module's output",
    "gradients": "gradient of every factor",
    "grad_norm": "gradient norm, clipping, learning rate",
    "deltas": "what the optimizer changed",
    "saved_file": "saved file, read by PEFT",
    "fresh_adapter": "fresh adapter, bit for bit",
    "collectives": "collectives within the plan",
}
_AFTER_ADAM = ("deltas", "saved_file")
_EXACT = ("sequences", "fresh_adapter", "collectives")
_NOISE = 4.0


@dataclass(frozen=True)
class TensorResult:
    """One tensor of one phase.

    Attributes:
        error: relative; infinite where it cannot be compared. limit: what it may be.
        whole: the reference's. pieces: what the ranks hold, for a diagnosis. note: why it cannot be compared.
    """

    name: str
    error: float
    limit: float
    whole: Tensor | None = None
    pieces: list[Piece] = field(default_factory=list)
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class Phase:
    """All tensors of one phase."""

    name: str
    results: list[TensorResult]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    @property
    def worst(self) -> TensorResult | None:
        """The tensor that is furthest beyond, or nearest to, its limit."""
        return max(self.results, key=lambda r: (not r.passed, r.error / max(r.limit, 1e-300)), default=None)


@dataclass(frozen=True)
class Evidence:
    """Everything that is compared: the reference, ours by rank, and what ours left on disk.

    rounded: the reference in the precision of ours, several times; empty in float64.
    """

    topology: Topology
    dtype: str
    reference: Trace
    rounded: list[Trace]
    ranks: list[Trace]
    saved: Saved
    fresh_init: bool | str
    seed: int


def judge(evidence: Evidence) -> list[Phase]:
    """The phases in order."""
    results = _Judge(evidence)
    return [Phase(name, getattr(results, name)()) for name in PHASES]


class _Judge:
    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.reference, self.ranks, self.topology = evidence.reference, evidence.ranks, evidence.topology
        self.ownership = Ownership(self.ranks, self.reference, self.topology)
        self.tokens = Tokens(self.reference)
        self.rows = [self.tokens.rows(trace.micro_batches) for trace in self.ranks]

    def sequences(self) -> list[TensorResult]:
        """Each sequence of the step is taken by one dp rank, by all of its tp ranks; the trained tokens are counted."""
        results = []
        for index, sequence in enumerate(self.tokens.sequences):
            takers = [sum(sequence == s for m in trace.micro_batches for s in sequences_of(m)) for trace in self.ranks]
            by_tp = {sum(takers[t :: self.topology.tp]) for t in range(self.topology.tp)}
            note = "" if by_tp == {1} else f"taken {' or '.join(map(str, sorted(by_tp)))} times"
            results.append(TensorResult(f"sequence {index}", 0.0 if not note else math.inf, 0.0, note=note))
        for step, number in enumerate(self.reference.num_tokens):
            ours = {_at(trace.num_tokens, step) for trace in self.ranks}
            note = "" if ours == {number} else f"{', '.join(map(str, sorted(ours)))} trained tokens, not {number}"
            error = max(abs(n - number) / number for n in ours)
            results.append(TensorResult(f"tokens of step {step + 1}", error, 0.0, note=note))
        return results

    def loaded_adapter(self) -> list[TensorResult]:
        return self._factors([t.initial for t in self.ranks], self.reference.initial, [], exact=True)

    def fresh_adapter(self) -> list[TensorResult]:
        """Fresh adapters, as the user configured them and with B drawn as well: by the rule, to the bit.

        Their scales, and the file that the second of them is saved in, are what PEFT makes of the configuration.
        """
        saved, scales, results = self.evidence.saved, self.reference.scalings, []
        drawn = {name: t for name, t in self.reference.initial.items() if ".lora_" in name}
        magnitudes = {name: t for name, t in self.reference.row_norms.items() if name in drawn}
        of_base = {name: t for name, t in self.reference.base.items() if name in self.reference.initial}
        expected: dict[str, Tensor] = {}
        for kind, init in (("fresh", self.evidence.fresh_init), ("fresh_both", False)):
            ranks = [getattr(trace, kind) for trace in self.ranks]
            expected = {
                name: expected_fresh(name, tuple(t.shape), init=init, seed=self.evidence.seed)
                for name, t in drawn.items()
                if name not in magnitudes
            }
            results += self._factors([_only(r, expected) for r in ranks], expected, [], exact=True)
            results += self._factors([_only(r, of_base) for r in ranks], of_base, [], exact=True)
            # With B drawn a magnitude is that of the sum; of the configured adapter it is the base's.
            if kind == "fresh":
                close = self._factors([_only(r, magnitudes) for r in ranks], magnitudes, [], exact=True)
                results += [replace(result, limit=1e-6) for result in close]
            unknown = {name for r in ranks for name in r} - drawn.keys() - of_base.keys()
            results += _missing(unknown, ())
        every = [saved.fresh_scalings, *(t.scalings for t in self.ranks), *(t.fresh_scalings for t in self.ranks)]
        wrong = sorted(n for s in every for n in s.keys() | scales.keys() if not _near(s.get(n), scales.get(n)))
        if wrong or saved.fresh_note:
            note = saved.fresh_note or f"where it sits, or its scale, is not what PEFT says: {wrong[0]}"
            results.append(TensorResult(f"{FRESH}/{CONFIG}", math.inf, 0.0, note=note))
        return results + self._bits(FRESH, _only(saved.fresh, expected), [expected])

    def forward(self) -> list[TensorResult]:
        return self._modules("forward", [name for name in self.reference.order if name])

    def logits(self) -> list[TensorResult]:
        return self._modules("forward", [""])

    def backward(self) -> list[TensorResult]:
        """In the order in which gradients flow: from the head to the first layer."""
        with_gradient = self.reference.micro_batches[0].backward
        return self._modules("backward", [name for name in reversed(self.reference.order) if name in with_gradient])

    def loss(self) -> list[TensorResult]:
        """Of every step as it is reported, and of all sequences as they are evaluated after the last."""
        return self._scalars("losses", "loss of step") + self._scalars("eval_losses", "loss of evaluation")

    def grad_norm(self) -> list[TensorResult]:
        """Norm and learning rate of every step as they are reported, and the first step's gradients after clipping."""
        low = [trace.clipped for trace in self.evidence.rounded]
        return [
            *self._scalars("grad_norms", "norm of step"),
            *self._factors([t.clipped for t in self.ranks], self.reference.clipped, low, label="clipped "),
            *self._scalars("rates", "learning rate of step"),
        ]

    def gradients(self) -> list[TensorResult]:
        low = [trace.gradients for trace in self.evidence.rounded]
        return self._factors([t.gradients for t in self.ranks], self.reference.gradients, low)

    def deltas(self) -> list[TensorResult]:
        """What all optimizer steps together changed."""
        ours, low = ([_minus(t.final, t.initial) for t in of] for of in (self.ranks, self.evidence.rounded))
        return self._factors(ours, _minus(self.reference.final, self.reference.initial), low, phase="deltas")

    def saved_file(self) -> list[TensorResult]:
        """What PEFT reads from the saved adapter, less what training began with; and the logits it then gives.

        Besides: the files hold to the bit what the ranks hold, and nothing else, and the configuration is the one that
        training started from.
        """
        saved, reference, rounded = self.evidence.saved, self.reference, self.evidence.rounded
        if saved.note:
            return [TensorResult(WEIGHTS, math.inf, 0.0, note=saved.note)]
        wholes = _minus(reference.final, reference.initial)
        low = [_minus(trace.final, trace.initial) for trace in rounded]
        results = _missing(saved.read.keys(), wholes.keys())
        for name in sorted(wholes.keys() & saved.read.keys(), key=self._place):
            if saved.read[name].shape != wholes[name].shape:
                shapes = f"{list(saved.read[name].shape)}, not {list(wholes[name].shape)}"
                results.append(TensorResult(name, math.inf, 0.0, note=shapes))
                continue
            piece = Piece(0, (), saved.read[name] - reference.initial[name])
            results.append(self._compare(name, [piece], wholes[name], [d[name] for d in low], "saved_file"))
        if saved.logits is not None and reference.final_logits is not None:
            piece = Piece(0, (), saved.logits)
            floor = [t.final_logits for t in rounded if t.final_logits is not None]
            results.append(self._compare("logits of PEFT", [piece], reference.final_logits, floor, "saved_file"))
        if saved.config_note:
            results.append(TensorResult(CONFIG, math.inf, 0.0, note=saved.config_note))
        results += self._bits(LAST, saved.last, [trace.final for trace in self.ranks])
        return results + self._bits(FIRST, saved.first, [trace.initial for trace in self.ranks])

    def collectives(self) -> list[TensorResult]:
        """No more calls than the plan says, on any rank."""
        results = []
        for key in sorted({k for t in self.ranks for k in (*t.collectives, *t.budget)}):
            used = max(trace.collectives.get(key, 0) for trace in self.ranks)
            budget = min(trace.budget.get(key, 0) for trace in self.ranks)
            note = f"{used} calls, the plan has {budget}"
            results.append(TensorResult(key, max(0, used - budget) / max(budget, 1), 0.0, note=note))
        return results

    def _modules(self, phase: str, names: list[str]) -> list[TensorResult]:
        """Outputs of modules, or their gradients, over all tokens of the first step."""
        rounded, results = self.evidence.rounded, []
        for name in names:
            found = canonical(self.reference, self.tokens, phase, name)
            if found is None:
                continue
            low = [whole for t in rounded if (whole := canonical(t, self.tokens, phase, name)) is not None]
            shown = name or "logits"
            try:
                pieces = token_pieces(self.ranks, self.rows, self.ownership, phase, name, *found)
            except ShapeError as error:
                results.append(TensorResult(shown, math.inf, 0.0, note=str(error)))
                continue
            if phase == "backward" and name.partition("#")[0] in self.ranks[0].terms:
                pieces = _summed_where_unequal(pieces, found[0])
            results.append(self._compare(shown, pieces, found[0], [whole for whole, _ in low], phase))
        if len(names) > 1:
            ours = {n for t in self.ranks for m in t.micro_batches for n in getattr(m, phase) if n}
            results += [r for r in _missing(ours, set(names)) if "not in the reference" in r.note]
        return results

    def _bits(self, file: str, stored: dict[str, Tensor], holders: list[dict[str, Tensor]]) -> list[TensorResult]:
        """Nothing where the file holds, to the bit, what these hold; else one failed result."""
        ours = holders if len(holders) > 1 else holders * self.topology.world
        wrong = [r.name for r in self._factors(ours, stored, [], exact=True) if not r.passed]
        note = f"{len(wrong)} of its tensors are not what the ranks hold, to the bit, first {min(wrong, default='')}"
        return [TensorResult(f"{file}/{WEIGHTS}", math.inf, 0.0, note=note)] if wrong else []

    def _factors(
        self,
        ours: list[dict[str, Tensor]],
        wholes: dict[str, Tensor],
        rounded: list[dict[str, Tensor]],
        *,
        phase: str = "gradients",
        exact: bool = False,
        label: str = "",
    ) -> list[TensorResult]:
        results = _missing({name for factors in ours for name in factors}, wholes.keys())
        for name in sorted(wholes, key=self._place, reverse=phase == "gradients" and not exact):
            whole = wholes[name]
            try:
                pieces = factor_pieces(ours, self.ownership, name, whole)
            except ShapeError as error:
                results.append(TensorResult(name, math.inf, 0.0, note=str(error)))
                continue
            if exact:
                results.append(TensorResult(name, _relative(pieces, whole), 0.0, whole, pieces))
            else:
                results.append(self._compare(label + name, pieces, whole, [low[name] for low in rounded], phase))
        return results

    def _place(self, factor: str) -> tuple[int, str]:
        """Where the module of a factor comes in execution order."""
        module = factor.rpartition(".lora_")[0]
        return self.reference.order.index(module) if module in self.reference.order else -1, factor

    def _scalars(self, field_name: str, label: str) -> list[TensorResult]:
        """One number a step. In low precision all steps share the noise: a single number may be lucky."""
        reference: list[float] = getattr(self.reference, field_name)
        numbers = {len(getattr(trace, field_name)) for trace in self.ranks}
        wholes = torch.tensor(reference, dtype=torch.float64)
        low = [torch.tensor(getattr(t, field_name), dtype=torch.float64) for t in self.evidence.rounded]
        results = []
        if numbers != {len(reference)}:
            note = f"there are {' or '.join(map(str, sorted(numbers)))}, not {len(reference)}"
            results.append(TensorResult(f"{label} {min(*numbers, len(reference)) + 1}", math.inf, 0.0, note=note))
        for step, whole in enumerate(wholes[: min(*numbers, len(reference))]):
            values = [
                Piece(rank, (rank,), torch.tensor([getattr(trace, field_name)[step]], dtype=torch.float64))
                for rank, trace in enumerate(self.ranks)
            ]
            noise = max((float((own - wholes).abs().max()) for own in low), default=None)
            results.append(self._compare(f"{label} {step + 1}", values, whole.reshape(1), [], "loss", noise=noise))
        return results

    def _compare(
        self,
        name: str,
        pieces: list[Piece],
        whole: Tensor,
        rounded: list[Tensor],
        phase: str,
        *,
        noise: float | None = None,
    ) -> TensorResult:
        """Against the limit of the phase and precision."""
        if rounded:
            noise = max(float((low.double() - whole.double()).abs().max()) if whole.numel() else 0.0 for low in rounded)
        if noise is None:
            limit = 1e-6 if phase in _AFTER_ADAM else 1e-11
            return TensorResult(name, _relative(pieces, whole), limit, whole, pieces)
        largest = float(whole.double().abs().max()) if whole.numel() else 1.0
        eps = torch.finfo(getattr(torch, self.evidence.dtype)).eps
        limit = _NOISE * noise / max(largest, 1e-300) + eps
        if not math.isfinite(limit):
            return TensorResult(name, math.inf, 0.0, note="one process itself computes values that are not finite")
        return TensorResult(name, _relative(pieces, whole, largest=True), limit, whole, pieces)


def _summed_where_unequal(pieces: list[Piece], whole: Tensor) -> list[Piece]:
    """Inside a region a gradient is one term on each rank, but where what comes after has left the region already.

    Whichever is nearer: copies of a whole and terms of a sum are far apart, in every precision.
    """
    total = [sum_of(pieces, whole)]
    return min((pieces, total), key=lambda found: _relative(found, whole))


def _relative(pieces: list[Piece], whole: Tensor, *, largest: bool = False) -> float:
    """The worst copy's relative distance from `whole`: L2, or of the largest element."""
    errors = []
    for copy in {piece.copy for piece in pieces}:
        own = [piece for piece in pieces if piece.copy == copy]
        if not is_complete(own, whole) or not all(bool(torch.isfinite(p.values).all()) for p in own):
            return math.inf
        if bool(whole.any()) and not any(bool(piece.values.any()) for piece in own):
            return math.inf
        gaps = [piece.values.double() - piece.of(whole).double() for piece in own]
        if largest:
            gap = max((float(g.abs().max()) for g in gaps if g.numel()), default=0.0)
            errors.append(gap / max(float(whole.double().abs().max()), 1e-300))
        else:
            gap = math.sqrt(sum(float(g.square().sum()) for g in gaps))
            errors.append(gap / max(float(whole.double().norm()), 1e-300))
    return max(errors, default=math.inf)


def _only(factors: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: factors[name] for name in names if name in factors}


def _missing(ours: Iterable[str], reference: Iterable[str]) -> list[TensorResult]:
    """One failed result for each name that only one side has."""
    ours, reference = set(ours), set(reference)
    notes = dict.fromkeys(reference - ours, "not in ours") | dict.fromkeys(ours - reference, "not in the reference")
    return [TensorResult(name, math.inf, 0.0, note=note) for name, note in sorted(notes.items())]


def _minus(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() - b[name].double() for name, value in a.items() if name in b}


def _at(values: list[int], step: int) -> float:
    """Infinite where a rank has made fewer steps."""
    return values[step] if step < len(values) else math.inf


def _near(a: float | None, b: float | None) -> bool:
    """Whether two scales are equal, up to the last bit of a quotient."""
    return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-12)
