"""The judge: two traces in, a verdict out. Each tensor by itself; nothing is averaged.

Owns: the phases, their limits, and what counts as equal. Does not own: the likely cause (`oracle.diagnose`), or how the
traces came about.

Limits come from precision. In float64 (lifted) the relative L2 distance of a tensor is at most 1e-11, of what AdamW
made of it 1e-6, as Adam divides by tiny moments. In a lower precision the reference runs twice, and ours may be as far
from float64 as four times what the reference's own rounding makes: `max|ours - ref64| <= 4 max|ref_low - ref64|`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshlora.oracle.inputs import expected_fresh
from meshlora.oracle.trace import Trace
from meshlora.oracle.unshard import (
    Piece,
    ShapeError,
    Tokens,
    canonical,
    factor_pieces,
    is_complete,
    sequences_of,
    token_pieces,
)
from meshlora.plan.topology import Topology

# Phase -> what it is, in the order in which a fault shows first.
PHASES = {
    "sequences": "each sequence and token once",
    "loaded_adapter": "adapter as loaded",
    "forward": "output of every module",
    "logits": "logits",
    "loss": "loss of every step",
    "backward": "gradient of every module's output",
    "gradients": "gradient of every factor",
    "grad_norm": "gradient norm of every step",
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
    """Everything that is compared: the reference, ours by rank, and what PEFT read from the saved file."""

    topology: Topology
    dtype: str
    reference: Trace
    rounded: Trace | None
    ranks: list[Trace]
    saved: dict[str, Tensor]
    saved_logits: Tensor | None
    saved_note: str
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
            ours = {trace.num_tokens[step] for trace in self.ranks}
            note = "" if ours == {number} else f"{', '.join(map(str, sorted(ours)))} trained tokens, not {number}"
            error = max(abs(n - number) / number for n in ours)
            results.append(TensorResult(f"tokens of step {step + 1}", error, 0.0, note=note))
        return results

    def loaded_adapter(self) -> list[TensorResult]:
        return self._factors([t.initial for t in self.ranks], self.reference.initial, None, exact=True)

    def fresh_adapter(self) -> list[TensorResult]:
        """Fresh adapters, as the user configured them and with B drawn as well: by the rule, to the bit."""
        results = []
        for kind, init in (("fresh", self.evidence.fresh_init), ("fresh_both", False)):
            expected = {
                name: expected_fresh(name, (t.shape[0], t.shape[1]), init=init, seed=self.evidence.seed)
                for name, t in self.reference.initial.items()
            }
            results += self._factors([getattr(trace, kind) for trace in self.ranks], expected, None, exact=True)
        return results

    def forward(self) -> list[TensorResult]:
        return self._modules("forward", [name for name in self.reference.order if name])

    def logits(self) -> list[TensorResult]:
        return self._modules("forward", [""])

    def backward(self) -> list[TensorResult]:
        """In the order in which gradients flow: from the head to the first layer."""
        with_gradient = self.reference.micro_batches[0].backward
        return self._modules("backward", [name for name in reversed(self.reference.order) if name in with_gradient])

    def loss(self) -> list[TensorResult]:
        return self._scalars("losses", "loss of step")

    def grad_norm(self) -> list[TensorResult]:
        return self._scalars("grad_norms", "norm of step")

    def gradients(self) -> list[TensorResult]:
        rounded = self.evidence.rounded
        return self._factors(
            [t.gradients for t in self.ranks], self.reference.gradients, rounded.gradients if rounded else None
        )

    def deltas(self) -> list[TensorResult]:
        """What all optimizer steps together changed."""
        rounded = self.evidence.rounded
        ours = [_minus(t.final, t.initial) for t in self.ranks]
        return self._factors(
            ours,
            _minus(self.reference.final, self.reference.initial),
            _minus(rounded.final, rounded.initial) if rounded else None,
            phase="deltas",
        )

    def saved_file(self) -> list[TensorResult]:
        """What PEFT reads from the saved adapter, less what training began with; and the logits it then gives."""
        evidence, reference, rounded = self.evidence, self.reference, self.evidence.rounded
        if evidence.saved_note:
            return [TensorResult("adapter_model.safetensors", math.inf, 0.0, note=evidence.saved_note)]
        wholes = _minus(reference.final, reference.initial)
        low = _minus(rounded.final, rounded.initial) if rounded else {}
        results = _missing(evidence.saved.keys(), wholes.keys())
        for name in wholes.keys() & evidence.saved.keys():
            if evidence.saved[name].shape != wholes[name].shape:
                shapes = f"{list(evidence.saved[name].shape)}, not {list(wholes[name].shape)}"
                results.append(TensorResult(name, math.inf, 0.0, note=shapes))
                continue
            piece = Piece(0, (), evidence.saved[name] - reference.initial[name])
            results.append(self._compare(name, [piece], wholes[name], low.get(name), "saved_file"))
        if evidence.saved_logits is not None and reference.final_logits is not None:
            piece = Piece(0, (), evidence.saved_logits)
            floor = rounded.final_logits if rounded else None
            results.append(self._compare("logits of PEFT", [piece], reference.final_logits, floor, "saved_file"))
        return results

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
            low = canonical(rounded, self.tokens, phase, name) if rounded else None
            shown = name or "logits"
            try:
                pieces = token_pieces(self.ranks, self.rows, self.topology, phase, name, *found)
            except ShapeError as error:
                results.append(TensorResult(shown, math.inf, 0.0, note=str(error)))
                continue
            results.append(self._compare(shown, pieces, found[0], low[0] if low else None, phase))
        if len(names) > 1:
            ours = {n for t in self.ranks for m in t.micro_batches for n in getattr(m, phase) if n}
            results += [r for r in _missing(ours, set(names)) if "not in the reference" in r.note]
        return results

    def _factors(
        self,
        ours: list[dict[str, Tensor]],
        wholes: dict[str, Tensor],
        rounded: dict[str, Tensor] | None,
        *,
        phase: str = "gradients",
        exact: bool = False,
    ) -> list[TensorResult]:
        results = _missing({name for factors in ours for name in factors}, wholes.keys())
        for name in sorted(wholes, key=self._place, reverse=phase == "gradients" and not exact):
            whole = wholes[name]
            try:
                pieces = factor_pieces(ours, self.topology, name, whole)
            except ShapeError as error:
                results.append(TensorResult(name, math.inf, 0.0, note=str(error)))
                continue
            if exact:
                results.append(TensorResult(name, _relative(pieces, whole), 0.0, whole, pieces))
            else:
                results.append(self._compare(name, pieces, whole, rounded[name] if rounded else None, phase))
        return results

    def _place(self, factor: str) -> tuple[int, str]:
        """Where the module of a factor comes in execution order."""
        module = factor.rpartition(".lora_")[0]
        return self.reference.order.index(module) if module in self.reference.order else -1, factor

    def _scalars(self, field_name: str, label: str) -> list[TensorResult]:
        """One number a step. In low precision all steps share the noise: a single number may be lucky."""
        reference: list[float] = getattr(self.reference, field_name)
        wholes = torch.tensor(reference, dtype=torch.float64)
        low = torch.tensor(getattr(self.evidence.rounded, field_name)) if self.evidence.rounded else None
        noise = None if low is None else float((low - wholes).abs().max())
        results = []
        for step, whole in enumerate(wholes):
            values = [
                Piece(rank, (rank,), torch.tensor([getattr(trace, field_name)[step]], dtype=torch.float64))
                for rank, trace in enumerate(self.ranks)
            ]
            result = self._compare(f"{label} {step + 1}", values, whole.reshape(1), None, "loss", noise=noise)
            results.append(result)
        return results

    def _compare(
        self,
        name: str,
        pieces: list[Piece],
        whole: Tensor,
        rounded: Tensor | None,
        phase: str,
        *,
        noise: float | None = None,
    ) -> TensorResult:
        """Against the limit of the phase and precision."""
        if rounded is not None:
            noise = float((rounded.double() - whole.double()).abs().max()) if whole.numel() else 0.0
        if noise is None:
            limit = 1e-6 if phase in _AFTER_ADAM else 1e-11
            return TensorResult(name, _relative(pieces, whole), limit, whole, pieces)
        largest = float(whole.double().abs().max()) if whole.numel() else 1.0
        eps = torch.finfo(getattr(torch, self.evidence.dtype)).eps
        limit = _NOISE * noise / max(largest, 1e-300) + eps
        return TensorResult(name, _relative(pieces, whole, largest=True), limit, whole, pieces)


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


def _missing(ours: Iterable[str], reference: Iterable[str]) -> list[TensorResult]:
    """One failed result for each name that only one side has."""
    ours, reference = set(ours), set(reference)
    notes = dict.fromkeys(reference - ours, "not in ours") | dict.fromkeys(ours - reference, "not in the reference")
    return [TensorResult(name, math.inf, 0.0, note=note) for name, note in sorted(notes.items())]


def _minus(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() - b[name].double() for name, value in a.items() if name in b}
