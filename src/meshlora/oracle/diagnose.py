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
from meshlora.oracle.saved import CONFIG, FRESH, WEIGHTS
from meshlora.oracle.symptoms import are_close, centred, is_permuted, rank_errors, ratio_of, simple_ratio
from meshlora.oracle.unshard import Piece, Tokens, canonical, sequences_of

_ROUNDED_TO = 1e-6
_LOW_PRECISION = "right to the digits of float32: something is computed, or kept, in a lower precision than float64"


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
    errors = rank_errors(result) if phase.name != "saved_file" else {}  # a file is nobody's
    case = _Case(phase, result, evidence)
    return Divergence(
        phase.name,
        result.name,
        result.error,
        sorted(rank for rank, error in errors.items() if error > max(result.limit, 1e-12)),
        simple_ratio(result.pieces, result.whole, _tolerance(evidence)),
        _LOW_PRECISION if _is_rounding(case) else _CAUSES[phase.name](case),
        sum(not r.passed for r in phase.results),
    )


def _is_rounding(case: _Case) -> bool:
    """Whether everything in a float64 run is right to as many digits as float32 has."""
    return (
        case.phase.name in ("forward", "logits", "backward", "gradients")
        and case.evidence.dtype == "float64"
        and all(result.error < _ROUNDED_TO for result in case.phase.results)
    )


def _is_later_step(result: TensorResult) -> bool:
    if result.name.startswith("loss of evaluation"):  # after the last step
        return True
    number = result.name.rpartition(" step ")[2]
    return number.isdecimal() and number != "1"


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
            float(centred(total - parts[key]).norm()) <= self.tolerance * float(centred(parts[key]).norm())
            for key, total in totals.items()
        )


def _sequences(case: _Case) -> str:
    if case.result.name.startswith("sequence"):
        known = set(Tokens(case.evidence.reference).sequences)
        taken = {s for trace in case.evidence.ranks for m in trace.micro_batches for s in sequences_of(m)}
        if any(len(set(sequence)) > 1 for sequence in taken - known):  # a dummy's tokens are all alike
            return "the step takes other sequences, or other tokens of them: the order of the epoch, or the padding"
        return "the dp ranks' shares of a global batch are not disjoint, or do not cover it: a wrong accumulation index"
    ours, expected = case.evidence.ranks[0].num_tokens[0], case.evidence.reference.num_tokens[0]
    if ours > expected:
        return "tokens are counted that train nothing: of a dummy micro-batch, of padding, or of a rank twice"
    return "trained tokens are lost: labels shifted after the tokens were split, or a rank's tokens not counted"


def _loaded_adapter(case: _Case) -> str:
    wrong = [p for p in case.result.pieces if not torch.equal(p.values.double(), p.of(_whole(case)).double())]
    if wrong and not any(bool(p.values.any()) for p in wrong):
        return "these ranks hold zeros: the adapter was loaded on the other ranks only"
    if is_permuted(case.result):
        return "each rank holds another rank's slice of the adapter"
    return "the adapter that training starts from is not the one in the file"


def _forward(case: _Case) -> str:
    name, whole = case.result.name, _whole(case)
    fact, block = case.fact(name), case.block(name)
    gaps = torch.cat([p.values.double() - p.of(whole).double() for p in case.result.pieces if p.dim is None] or [whole])
    is_offset = gaps.ndim > 1 and float(centred(gaps).norm()) <= case.tolerance * float(gaps.norm())
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
    if is_permuted(case.result):
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
    ratio = ratio_of(pieces, (whole - base).double(), case.tolerance)
    if ratio is None:
        return ""
    if abs(ratio - 1) < case.tolerance:
        return "the gap is the same for every token: the bias is missing, or is another rank's slice"
    if case.tp > 1 and abs(ratio * case.tp - 1) < case.tolerance:
        return "the LoRA scale is divided by tp, or follows another rule (rsLoRA, alpha_pattern)"
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
    if case.result.name.startswith("loss of evaluation"):
        return "the training losses are right and the evaluated one is not: what is evaluated, or how it is averaged"
    if case.result.note:
        return f"{case.result.note}: optimizer steps are left out, or not reported"
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
    splits = sorted({(r.name.rpartition("_")[2], case.fact(r.name)) for r in failed})
    kinds = [f"{side} of {split}{'' if split == 'whole' else '-parallel'} linears" for side, split in splits]
    is_all = len(failed) == len(case.phase.results)
    which = "every factor" if is_all else " and ".join(kinds)
    # Only what is whole on a rank is summed over tp, and everything is summed over dp.
    may_be = {"tp": case.tp > 1 and all(p.dim is None for r in failed for p in r.pieces), "dp": case.dp > 1 and is_all}
    for axis in (name for name, possible in may_be.items() if possible):
        size = getattr(case, axis)
        if case.ratio == 1 / size:
            return f"the gradient of {which} is averaged over {axis} instead of summed"
        if case.ratio == size:
            return f"the gradient of {which} is summed over {axis} twice, or though each rank has all of it"
        if all(case.adds_up_over(axis, result) for result in failed):
            return f"the gradient of {which} is not summed over {axis}: the ranks' gradients add up to the reference"
    by_rank = {
        rank: ratio_of([p for p in case.result.pieces if p.rank == rank], _whole(case), case.tolerance)
        for rank in {p.rank for p in case.result.pieces}
    }
    ratios = {round(r, 6) for r in by_rank.values() if r}
    if all(by_rank.values()) and len(ratios) > 1:
        return (
            f"each rank scales {which} by a number of its own: divided by its own token count, or clipped by its norm"
        )
    if is_all and case.dp > 1:
        return "the dp ranks' gradients are weighed unequally: a mean of means, or clipped before the sum"
    if is_all:
        return "every gradient is off though every activation's gradient is right: clipped or scaled before the sum"
    if all(by_rank.values()) and ratios:
        return (
            f"the gradient of {which} is {min(ratios):.4g} times what it should be: a factor, such as the LoRA scale, "
            "is left out or applied twice"
        )
    return f"the gradient of {which} is wrong though the gradients of all activations are right"


def _grad_norm(case: _Case) -> str:
    if case.result.name.startswith("clipped "):
        return "gradients and norm are right and the clipped gradients are not: by how much they are scaled down"
    if case.result.name.startswith("learning rate"):
        return "the learning rate is not what the schedule says, or not the one that is reported"
    if case.result.note:
        return f"{case.result.note}: optimizer steps are left out, or not reported"
    reference = case.evidence.reference.gradients
    squares = {name: float(g.double().square().sum()) for name, g in reference.items()}
    local = case.evidence.ranks[0].gradients
    whole = sum(s for name, s in squares.items() if local[name].shape == reference[name].shape)
    replicas = math.sqrt(sum(squares.values()) + (case.tp - 1) * whole)
    if abs(case.evidence.ranks[0].grad_norms[0] / replicas - 1) < case.tolerance:
        return "the copies that tp ranks hold of a whole factor are counted as often as there are ranks"
    return "the gradients are right and their norm is not"


def _deltas(case: _Case) -> str:
    trace, one = case.evidence.ranks[0], case.evidence.reference
    if len(trace.losses) != len(one.losses):
        return f"{len(trace.losses)} optimizer steps were taken, not {len(one.losses)}"
    if trace.num_tokens != one.num_tokens:
        return "the first step is right, and later ones take other sequences: the order of an epoch, or where it ends"
    ours, reference = trace.rates, one.rates
    wrong = [i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if abs(a - b) > 1e-9 * b]
    if wrong:
        return f"the learning rate of step {wrong[0] + 1} is {ours[wrong[0]]:.3g}, not {reference[wrong[0]]:.3g}"
    return (
        "gradients, clipping and the reported learning rate are right: what the optimizer makes of them (its betas, "
        "epsilon, weight decay, or the factors that it steps)"
    )


def _saved_file(case: _Case) -> str:
    result, evidence = case.result, case.evidence
    if result.name == CONFIG:
        return f"the stored configuration is not the one that was trained: {result.note}"
    if result.name.endswith(f"/{WEIGHTS}"):
        return f"{result.note}: rounded, stored before the last step, or entries that no factor has"
    if result.note:
        times = any(f" {word}" in result.note for word in ("mismatch", "size"))
        also = f": {evidence.saved.config_note}" if evidence.saved.config_note else ""
        return "whole entries are stored more than once, or in parts" if times else f"PEFT expects another file{also}"
    if result.name not in evidence.saved.read:
        return "PEFT computes something else with the saved adapter" + (
            f": {evidence.saved.config_note}" if evidence.saved.config_note else ""
        )
    stored, final = evidence.saved.read[result.name], evidence.reference.final[result.name]
    for dim in range(stored.ndim):
        parts = stored.tensor_split(case.tp, dim)
        expected = final.tensor_split(case.tp, dim)
        missing = [i for i, shard in enumerate(parts) if not bool(shard.any())]
        if missing:
            shards = f"shard of tp rank {missing[0]} is" if len(missing) == 1 else f"shards of tp ranks {missing} are"
            return f"the {shards} missing in the file"
        if case.tp > 1 and all(are_close(a, b) for a, b in zip(parts, expected[::-1], strict=True)):
            return "the shards are stored in reversed order"
    if are_close(stored, final):
        return "what is stored is rounded: the file has a lower precision than the ranks"
    return "what is stored is not what the ranks hold"


def _fresh_adapter(case: _Case) -> str:
    if case.result.name.startswith(f"{FRESH}/"):
        return f"a fresh adapter is saved with other values or another configuration than it has: {case.result.note}"
    ratio = ratio_of(case.result.pieces, _whole(case), case.tolerance)
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
