"""Diagnosis: where ours first leaves the reference, on which ranks, by which factor, and the likely cause in words.

Owns: the order in which phases are looked at, and the rules from symptom to cause. A rule only says what the numbers
show: that the copies of the ranks add up to the reference, that the gap is the same for every token, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshlora.oracle.capture import MicroBatchCapture
from meshlora.oracle.judge import Evidence, Phase, TensorResult
from meshlora.oracle.unshard import Piece, Tokens, canonical


@dataclass(frozen=True)
class Divergence:
    """The first place where ours is not the reference.

    Attributes:
        phase, name: which tensor, in execution order. relative: how far; infinite where it cannot be compared.
        ranks: those that hold a wrong part. ratio: of ours to the reference, where it is a small number or its inverse.
        cause: the likely one, in words. num_failed: tensors of the phase that fail.
    """

    phase: str
    name: str
    relative: float
    ranks: list[int]
    ratio: float | None
    cause: str
    num_failed: int


def first_divergence(phases: list[Phase], evidence: Evidence) -> Divergence | None:
    """The first failing tensor in the order in which a step runs; None where nothing fails."""
    failing = [(phase, result) for phase in phases for result in phase.results if not result.passed]
    if not failing:
        return None
    # The second step is computed from what the first one did, so it says nothing that the first does not say better.
    phase, result = next(((p, r) for p, r in failing if not _is_later_step(r)), failing[0])
    return Divergence(
        phase.name,
        result.name,
        result.error,
        sorted(rank for rank, error in rank_errors(result).items() if error > max(result.limit, 1e-12)),
        simple_ratio(result.pieces, result.whole, _tolerance(evidence)),
        _CAUSES[phase.name](_Case(phase, result, evidence)),
        sum(not r.passed for r in phase.results),
    )


def _is_later_step(result: TensorResult) -> bool:
    number = result.name.rpartition(" step ")[2]
    return number.isdecimal() and number != "1"


def rank_errors(result: TensorResult) -> dict[int, float]:
    """Rank -> relative distance of its own part; empty where the parts cannot be compared."""
    gaps: dict[int, list[float]] = {}
    for piece in result.pieces:
        assert result.whole is not None
        part = piece.of(result.whole).double()
        gap, size = gaps.setdefault(piece.rank, [0.0, 0.0]), float(part.square().sum())
        gap[0] += float((piece.values.double() - part).square().sum())
        gap[1] += size
    return {rank: math.sqrt(gap / max(size, 1e-300)) for rank, (gap, size) in gaps.items()}


def simple_ratio(pieces: list[Piece], whole: Tensor | None, tolerance: float) -> float | None:
    """n or 1/n for n in 2..16, if all of ours is that multiple of the reference; constant offsets are left out."""
    if whole is None or not pieces:
        return None
    ratio = _ratio(pieces, whole, tolerance)
    if ratio is None or ratio <= 0:
        return None
    number = ratio if ratio >= 1 else 1 / ratio
    is_simple = 2 <= round(number) <= 16 and abs(number / round(number) - 1) < tolerance
    return None if not is_simple else float(round(number)) if ratio > 1 else 1 / round(number)


def _ratio(pieces: list[Piece], whole: Tensor, tolerance: float) -> float | None:
    """c where ours = c * reference up to an offset that is the same for all rows; None where there is no such c."""
    ours = torch.cat([_centred(p.values).flatten() for p in pieces])
    parts = torch.cat([_centred(p.of(whole)).flatten() for p in pieces])
    norm = float(parts.square().sum())
    if not norm or not torch.isfinite(ours).all():
        return None
    ratio = float(ours @ parts) / norm
    return ratio if float((ours - ratio * parts).norm()) <= tolerance * float(ours.norm()) else None


def _centred(values: Tensor) -> Tensor:
    """Without the mean over rows: a bias, whatever multiple of it was added, is gone."""
    values = values.double()
    return values - values.mean(0, keepdim=True) if values.ndim > 1 and values.shape[0] > 2 else values


def _tolerance(evidence: Evidence) -> float:
    return 1e-6 if evidence.dtype == "float64" else 2e-2


@dataclass(frozen=True)
class _Case:
    """What a rule looks at: the first failing tensor, its phase, and everything else."""

    phase: Phase
    result: TensorResult
    evidence: Evidence

    @property
    def tolerance(self) -> float:
        return _tolerance(self.evidence)

    @property
    def tp(self) -> int:
        return self.evidence.topology.tp

    @property
    def dp(self) -> int:
        return self.evidence.topology.dp

    @property
    def ratio(self) -> float | None:
        return simple_ratio(self.result.pieces, self.result.whole, self.tolerance)

    def fact(self, name: str) -> str:
        """What the plan says of the module `name`, or of the one that the factor `name` belongs to."""
        module = name.partition("#")[0]
        return self.evidence.ranks[0].facts.get(module.rpartition(".lora_")[0] or module, "")

    def block(self, name: str) -> str:
        """The region that `name` is in, or ""."""
        parents = [r for r, fact in self.evidence.ranks[0].facts.items() if fact.endswith("region")]
        return next((r for r in parents if name == r or name.startswith(f"{r}.")), "")

    def adds_up_over(self, axis: str, result: TensorResult | None = None) -> bool:
        """Whether the parts of the ranks along `axis` are different terms whose sum is the reference."""
        result = result or self.result
        whole, topology = result.whole, self.evidence.topology
        if whole is None or getattr(topology, axis) == 1:
            return False
        other = "dp" if axis == "tp" else "tp"
        totals: dict[tuple[int | None, int, int], Tensor] = {}
        parts: dict[tuple[int | None, int, int], Tensor] = {}
        for piece in result.pieces:
            part = whole if piece.dim is None else whole.narrow(piece.dim, piece.start, piece.values.shape[piece.dim])
            # Every dp rank has tokens of its own and a copy of its own of each factor.
            copy = topology.coordinates(piece.rank)[other] if piece.rows is None else 0
            key = (piece.dim, piece.start, copy)
            total = totals.setdefault(key, torch.zeros_like(part, dtype=torch.float64))
            rows = torch.arange(part.shape[0]) if piece.rows is None else piece.rows
            total.index_add_(0, rows, piece.values.double())
            parts[key] = part.double()
        return all(
            float(_centred(total - parts[key]).norm()) <= self.tolerance * float(_centred(parts[key]).norm())
            for key, total in totals.items()
        )


def _sequences(case: _Case) -> str:
    if case.result.name.startswith("sequence"):
        return "the dp ranks' shares of a global batch are not disjoint, or do not cover it: a wrong accumulation index"
    ours, expected = case.evidence.ranks[0].num_tokens[0], case.evidence.reference.num_tokens[0]
    if ours > expected:
        return "tokens are counted that train nothing: of a dummy micro-batch, of padding, or of a rank twice"
    return "trained tokens are lost: labels shifted after the tokens were split, or a rank's tokens not counted"


def _loaded_adapter(case: _Case) -> str:
    wrong = [p for p in case.result.pieces if not torch.equal(p.values.double(), p.of(_whole(case)).double())]
    if wrong and not any(bool(p.values.any()) for p in wrong):
        return "these ranks hold zeros: the adapter was loaded on the other ranks only"
    if _is_permuted(case.result):
        return "each rank holds another rank's slice of the adapter"
    return "the adapter that training starts from is not the one in the file"


def _forward(case: _Case) -> str:
    name, whole = case.result.name, _whole(case)
    fact, block = case.fact(name), case.block(name)
    gaps = torch.cat([p.values.double() - p.of(whole).double() for p in case.result.pieces if p.dim is None] or [whole])
    is_offset = gaps.ndim > 1 and float(_centred(gaps).norm()) <= case.tolerance * float(gaps.norm())
    if fact == "row":
        if is_offset:
            return "the bias of a row-parallel linear is added on every rank, before the sum over tp"
        if case.ratio == 1 / case.tp:
            return "row-parallel output averaged over tp instead of summed"
        if case.ratio == case.tp:
            return "row-parallel output reduced over tp twice"
        if case.adds_up_over("tp"):
            return "row-parallel output not reduced over tp: the ranks' outputs add up to the reference"
        if case.evidence.topology.sp:
            return "row-parallel output not reduced over tp, or a rank has another rank's slice of the weight"
        return "a rank has another rank's slice of the row-parallel weight or of its A"
    if fact in ("column", "whole") and (words := _lora_part(case)):
        return words
    if _is_permuted(case.result):
        return "the tokens are in the wrong order: the cut or the gather over tp does not follow the ranks"
    if case.evidence.topology.sp and case.fact(block) == "whole region":
        return "a block that is not split saw only its rank's slice of the tokens"
    return "this module is the first that differs: its own weights, or how it is split"


def _lora_part(case: _Case) -> str:
    """What is wrong with the adapter's term alone, where the reference keeps the base output apart."""
    name, reference, whole = case.result.name, case.evidence.reference, _whole(case)
    if any(name not in micro.base for micro in reference.micro_batches):
        return ""
    base = _canonical_base(case, name)
    pieces = [
        Piece(p.rank, p.copy, p.values.double() - p.of(base).double(), p.rows, p.dim, p.start)
        for p in case.result.pieces
    ]
    if not any(bool(p.values.abs().max() > 1e-12) for p in pieces if p.values.numel()):
        return "the adapter's term is missing"
    ratio = _ratio(pieces, (whole - base).double(), case.tolerance)
    if ratio is None:
        return ""
    if case.tp > 1 and abs(ratio * case.tp - 1) < case.tolerance:
        return "the LoRA scale is divided by tp"
    return f"the LoRA scale is {ratio:.4g} times what it should be: applied twice, or with another rule"


def _canonical_base(case: _Case, name: str) -> Tensor:
    tokens = Tokens(case.evidence.reference)
    reference = case.evidence.reference
    stripped = [MicroBatchCapture(m.input_ids, m.attention_mask, {name: m.base[name]}) for m in reference.micro_batches]
    found = canonical(type(reference)(micro_batches=stripped), tokens, "forward", name)
    assert found is not None, name
    return found[0]


def _logits(case: _Case) -> str:
    return "every layer agrees and the logits do not: the output head, or how the last layer's tokens are joined"


def _loss(case: _Case) -> str:
    return (
        "the loss is not the sum over trained tokens divided by their global number: a mean of micro-batch means, "
        "or other labels"
    )


def _backward(case: _Case) -> str:
    name, order = case.result.name, case.evidence.reference.order
    if name == "logits":
        return "the gradient of the loss itself: tokens are weighed differently"
    following = order[order.index(name) + 1 :]
    fed = next((case.block(n) for n in following if case.block(n) not in ("", case.block(name))), "")
    where = f"of {fed} " if fed else ""
    if case.ratio == 1 / case.tp:
        return f"the input gradient {where}is averaged over tp instead of summed"
    if case.ratio == case.tp:
        return f"the input gradient {where}is reduced over tp twice"
    if case.fact(fed) == "split region" and not case.fact(name):
        return f"the input gradient of the column-parallel linears {where}is not reduced over tp"
    return "the first gradient, from the loss on, that differs: the backward of what this module's output goes into"


def _gradients(case: _Case) -> str:
    failed = [r for r in case.phase.results if not r.passed]
    kinds = sorted({f"{r.name.rpartition('_')[2]} of {case.fact(r.name)}-parallel linears" for r in failed})
    which = "every factor" if len(failed) == len(case.phase.results) else " and ".join(kinds)
    for axis, size in (("tp", case.tp), ("dp", case.dp)):
        if size > 1 and case.ratio == 1 / size:
            return f"the gradient of {which} is averaged over {axis} instead of summed"
        if all(case.adds_up_over(axis, result) for result in failed):
            return f"the gradient of {which} is not summed over {axis}: the ranks' gradients add up to the reference"
    by_rank = {
        rank: _ratio([p for p in case.result.pieces if p.rank == rank], _whole(case), case.tolerance)
        for rank in {p.rank for p in case.result.pieces}
    }
    if all(by_rank.values()) and len({round(r, 6) for r in by_rank.values() if r}) > 1:
        return (
            f"each rank scales {which} by a number of its own: divided by its own token count, or clipped by its norm"
        )
    if len(failed) == len(case.phase.results) and case.dp > 1:
        return "the dp ranks' gradients are weighed unequally: a mean of means, or clipped before the sum"
    if len(failed) == len(case.phase.results):
        return "every gradient is off though every activation's gradient is right: clipped or scaled before the sum"
    return f"the gradient of {which} is wrong though the gradients of all activations are right"


def _grad_norm(case: _Case) -> str:
    reference = case.evidence.reference.gradients
    squares = {name: float(g.double().square().sum()) for name, g in reference.items()}
    local = case.evidence.ranks[0].gradients
    whole = sum(s for name, s in squares.items() if local[name].shape == reference[name].shape)
    replicas = math.sqrt(sum(squares.values()) + (case.tp - 1) * whole)
    if abs(case.evidence.ranks[0].grad_norms[0] / replicas - 1) < case.tolerance:
        return "the copies that tp ranks hold of a whole factor are counted as often as there are ranks"
    return "the gradients are right and their norm is not"


def _deltas(case: _Case) -> str:
    return "gradients and norm are right: the optimizer, its learning rate, or clipping"


def _saved_file(case: _Case) -> str:
    result, evidence = case.result, case.evidence
    if result.note:
        times = any(f" {word}" in result.note for word in ("mismatch", "size"))
        return "whole entries are stored more than once, or in parts" if times else "the file is not what PEFT expects"
    if result.name not in evidence.saved:
        return "PEFT computes something else with the saved adapter"
    stored, final = evidence.saved[result.name], evidence.reference.final[result.name]
    for dim in range(stored.ndim):
        shards = stored.tensor_split(case.tp, dim)
        expected = final.tensor_split(case.tp, dim)
        missing = [i for i, shard in enumerate(shards) if not bool(shard.any())]
        if missing:
            return f"the shard of tp rank {', '.join(map(str, missing))} is missing in the file"
        if case.tp > 1 and all(_close(a, b) for a, b in zip(shards, expected[::-1], strict=True)):
            return "the shards are stored in reversed order"
    return "what is stored is not what the ranks hold"


def _fresh_adapter(case: _Case) -> str:
    ratio = _ratio(case.result.pieces, _whole(case), case.tolerance)
    if case.tp > 1 and ratio is not None and abs(ratio / math.sqrt(case.tp) - 1) < case.tolerance:
        return "A's bound comes from the local fan-in: it is sqrt(tp) too large"
    if any(error <= 1e-12 for error in rank_errors(case.result).values()):
        return "ranks drew different values: the generator's seed depends on the rank"
    return "the values are not those that seed and name determine"


def _collectives(case: _Case) -> str:
    phase = case.result.name.partition(" ")[0]
    return f"{case.result.note}: the {phase} communicates once per linear instead of once per region"


_CAUSES: dict[str, Callable[[_Case], str]] = {
    "sequences": _sequences,
    "loaded_adapter": _loaded_adapter,
    "forward": _forward,
    "logits": _logits,
    "loss": _loss,
    "backward": _backward,
    "gradients": _gradients,
    "grad_norm": _grad_norm,
    "deltas": _deltas,
    "saved_file": _saved_file,
    "fresh_adapter": _fresh_adapter,
    "collectives": _collectives,
}


def _whole(case: _Case) -> Tensor:
    return case.result.whole if case.result.whole is not None else torch.zeros(1)


def _is_permuted(result: TensorResult) -> bool:
    """Whether most of the rows that the ranks hold are rows of the reference that belong somewhere else.

    Most: where tokens moved, some of the places hold padding now, which the reference leaves out.
    """
    whole, found, total = result.whole, 0, 0
    for piece in result.pieces:
        if whole is None or not piece.values.numel() or piece.values.ndim < 2:
            continue
        candidates = whole.narrow(piece.dim, piece.start, piece.values.shape[piece.dim]) if piece.dim else whole
        ours, theirs = piece.values.flatten(1)[:16].double(), candidates.flatten(1).double()
        distance = torch.cdist(ours, theirs, compute_mode="donot_use_mm_for_euclid_dist").min(1).values
        found += int((distance <= 1e-6 * ours.norm(dim=1)).sum())
        total += len(ours)
    return found > total / 2


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a.double() - b.double()).norm()) <= 1e-4 * float(b.double().norm())
