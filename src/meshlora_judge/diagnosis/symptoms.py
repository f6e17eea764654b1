"""Symptoms: patterns in the numbers of the first failing tensor, whatever the cause.

Does not own: what follows from them (`meshlora_judge.diagnosis.causes`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshlora_ground.topology import Topology
from meshlora_judge.judge import Evidence
from meshlora_judge.results import Phase, TensorResult
from meshlora_judge.unshard import Piece, assembled


@dataclass(frozen=True)
class Failure:
    """The input of a rule: the first failing tensor, its phase, and all evidence."""

    phase: Phase
    result: TensorResult
    evidence: Evidence

    @property
    def tolerance(self) -> float:
        """Relative tolerance for a pattern to count as present."""
        return 1e-6 if self.evidence.case.dtype == "float64" else 2e-2

    @property
    def tp(self) -> int:
        return self.evidence.topology.tp

    @property
    def ratio(self) -> float | None:
        """n or 1/n for n in 2..16, if all of ours is that multiple of the reference, up to a constant offset."""
        ratio = ratio_of(self.result.pieces, self.whole, self.tolerance)
        if ratio is None or ratio <= 0:
            return None
        # A sum too many gives n, an average in its place 1/n.
        number = max(ratio, 1 / ratio)
        simple = round(number)
        if not 2 <= simple <= 16 or abs(number / simple - 1) >= self.tolerance:
            return None
        return float(simple) if ratio > 1 else 1 / simple

    @property
    def whole(self) -> Tensor:
        """The reference's tensor."""
        return self.result.whole if self.result.whole is not None else torch.zeros(1)

    @property
    def failed(self) -> list[TensorResult]:
        """All failing tensors of the phase."""
        return [result for result in self.phase.results if not result.passed]

    def fact(self, name: str) -> str:
        """The plan's split of the module `name`, or of the factor `name`'s module (`Trace.facts`)."""
        module = name.partition("#")[0]
        return self.evidence.ranks[0].facts.get(module.rpartition(".lora_")[0] or module, "")

    def is_embedding(self, name: str) -> bool:
        """Whether the module `name` embeds tokens: it has a weight, and nothing runs before it."""
        return name == self.evidence.reference.order[0] and name in self.evidence.reference.rows

    def block(self, name: str) -> str:
        """The region that contains `name`, or ""."""
        for region, fact in self.evidence.ranks[0].facts.items():
            if "region" in fact and f"{name}.".startswith(f"{region}."):
                return region
        return ""

    def sees_others(self, name: str) -> bool:
        """Whether `name` is in a block in which a rank's tokens see those of other ranks."""
        return "mixes tokens" in self.fact(self.block(name))

    @property
    def over_data(self) -> str:
        """`dp`, `dp and cp`: the axes along which ranks have other tokens and equal weights."""
        return " and ".join(axis for axis, size in self.evidence.topology.sizes.items() if size > 1 and axis != "tp")

    def adds_up_over(self, axis: str, result: TensorResult | None = None) -> bool:
        """Whether the parts of the ranks along `axis` are different terms whose sum is the reference."""
        result = result or self.result
        whole, topology = result.whole, self.evidence.topology
        if whole is None or getattr(topology, axis) == 1:
            return False
        place_of = topology.coordinates
        if axis in topology.expert_sizes:
            place_of = topology.expert_coordinates
        groups: dict[tuple[Any, ...], list[Piece]] = {}
        for piece in result.pieces:
            key: tuple[Any, ...] = (piece.dim, piece.start)
            if piece.rows is None:
                # Ranks elsewhere on the other axes hold different tokens, and separate copies of each factor.
                place = place_of(piece.rank)
                del place[axis]
                key += tuple(place.values())
            groups.setdefault(key, []).append(piece)
        for own in groups.values():
            total, part = own[0].along(assembled(own, whole, adds=True)), own[0].along(whole)
            if not is_near(centred(total), centred(part), self.tolerance):
                return False
        return True


def rank_errors(result: TensorResult) -> dict[int, float]:
    """Rank -> relative distance of its part; empty if the parts cannot be compared."""
    gaps: dict[int, list[float]] = {}
    for piece in result.pieces:
        assert result.whole is not None
        part = piece.of(result.whole).double()
        gap, size = gaps.setdefault(piece.rank, [0.0, 0.0]), float(part.square().sum())
        gap[0] += float((piece.values.double() - part).square().sum())
        gap[1] += size
    return {rank: math.sqrt(gap / max(size, 1e-300)) for rank, (gap, size) in gaps.items()}


def follows_from_gradients(evidence: Evidence) -> bool:
    """Whether torch's AdamW makes of the clipped gradients of each rank, at the reference's rates, what the rank ends
    with: the optimizer is right. False where that cannot be said: of other optimizers, and below float64.
    """
    case, rates = evidence.case, evidence.reference.rates
    if case.optimizer != "adamw" or case.lora_plus_ratio is not None or case.dtype != "float64":
        return False
    for trace in evidence.ranks:
        if trace.num_tokens != evidence.reference.num_tokens or len(trace.clipped) != len(rates):
            return False
        factors = {}
        for name, start in trace.initial.items():
            if name.endswith((".lora_A", ".lora_B")):
                factors[name] = start.clone()
        optimizer = torch.optim.AdamW(
            factors.values(), betas=(case.beta1, case.beta2), eps=case.eps, weight_decay=case.weight_decay
        )
        for rate, gradients in zip(rates, trace.clipped, strict=True):
            for name, factor in factors.items():
                factor.grad = gradients.get(name)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        for name, factor in factors.items():
            if not is_near(factor, trace.final[name], 1e-9):
                return False
    return True


def ratio_of(pieces: list[Piece], whole: Tensor, tolerance: float) -> float | None:
    """c with ours = c * reference up to an offset that is the same for all rows; None if there is no such c."""
    if not pieces:
        return None
    # The rows of a short sequence are too few to show an offset: those of all that a rank has do.
    of_ranks: dict[tuple[Any, ...], list[Piece]] = {}
    for piece in pieces:
        of_ranks.setdefault((piece.rank, piece.dim, piece.start, piece.values.shape[1:]), []).append(piece)
    of_ours, of_whole = [], []
    for own in of_ranks.values():
        of_ours.append(_rows([piece.values for piece in own]))
        of_whole.append(_rows([piece.of(whole) for piece in own]))
    ours, parts = torch.cat(of_ours), torch.cat(of_whole)
    norm = float(parts.square().sum())
    if not norm or not torch.isfinite(ours).all():
        return None
    ratio = float(ours @ parts) / norm
    return ratio if is_near(ratio * parts, ours, tolerance) else None


def _rows(parts: list[Tensor]) -> Tensor:
    """All elements of `parts`, rows of one rank, without their common offset."""
    return centred(torch.cat(list(map(torch.atleast_1d, parts)))).flatten()


def centred(values: Tensor) -> Tensor:
    """`values` minus their mean over rows, which removes any multiple of a bias."""
    values = values.double()
    if values.ndim > 1 and values.shape[0] > 2:  # of two rows one would be left, and its negative
        values = values - values.mean(0, keepdim=True)
    return values


def is_permuted(result: TensorResult) -> bool:
    """Whether most of the ranks' rows are misplaced rows of the reference.

    Most, not all: if tokens moved, some places now hold padding, which the reference leaves out.
    """
    whole, found, total = result.whole, 0, 0
    for piece in result.pieces:
        if whole is None or not piece.values.numel() or piece.values.ndim < 2:
            continue
        candidates = piece.along(whole) if piece.dim else whole
        ours, theirs = piece.values.flatten(1)[:16].double(), candidates.flatten(1).double()
        distance = torch.cdist(ours, theirs, compute_mode="donot_use_mm_for_euclid_dist").min(1).values
        found += int((distance <= 1e-6 * ours.norm(dim=1)).sum())
        total += len(ours)
    return found > total / 2


def is_scaled_by_column(pieces: list[Piece], whole: Tensor, tolerance: float) -> bool:
    """Whether each column is some multiple of the reference's, up to an offset."""
    if whole.ndim < 2:
        return False
    ours, theirs = centred(assembled(pieces, whole)), centred(whole)
    factors = (ours * theirs).sum(0) / theirs.square().sum(0).clamp(min=1e-300)
    return is_near(factors * theirs, ours, tolerance)


def is_scaled_by_row(pieces: list[Piece], whole: Tensor, tolerance: float) -> bool:
    """Whether each row of each rank is some multiple of the reference's."""
    for piece in pieces:
        ours, theirs = piece.values.double().flatten(1), piece.of(whole).double().flatten(1)
        factors = (ours * theirs).sum(1, keepdim=True) / theirs.square().sum(1, keepdim=True).clamp(min=1e-300)
        if not is_near(factors * theirs, ours, tolerance):
            return False
    return whole.ndim > 1


def are_columns_moved(ours: Tensor, whole: Tensor) -> bool:
    """Whether each row has the reference's values, in other columns."""
    if ours.shape != whole.shape or ours.ndim < 2:
        return False
    return is_near(ours.double().sort(-1).values, whole.double().sort(-1).values, 1e-6)


def is_in_rank_order(result: TensorResult, topology: Topology) -> bool:
    """Whether tp rank i holds the i-th part of the whole, whether or not it should."""
    whole, tp = result.whole, topology.tp
    if whole is None:
        return False
    for piece in result.pieces:
        if piece.dim is None or piece.values.shape[piece.dim] * tp != whole.shape[piece.dim]:
            return False
        part = whole.tensor_split(tp, piece.dim)[topology.coordinates(piece.rank)["tp"]]
        if not torch.equal(piece.values, part):
            return False
    return True


def is_held_by_several(result: TensorResult, topology: Topology) -> bool:
    """Whether each part is replicated on several tp ranks."""
    split = [piece for piece in result.pieces if piece.dim is not None]
    if not split:
        return True
    if result.whole is None or len(split) < len(result.pieces):
        return False
    for piece in split:
        assert piece.dim is not None
        if piece.values.shape[piece.dim] * topology.tp <= result.whole.shape[piece.dim]:
            return False
    return True


def squares_of_copies(evidence: Evidence) -> tuple[float, float]:
    """Sums of squared gradients of all copies over tp but the first: (of whole factors, of replicated parts)."""
    whole = shared = 0.0
    for name, gradient in evidence.reference.gradients.items():
        local = evidence.ranks[0].gradients.get(name)
        if local is None:  # of an expert that is elsewhere
            continue
        square = float(gradient.double().square().sum())
        # Of key/value heads that several tp ranks hold, each has more than its share.
        copies = local.numel() * evidence.topology.tp // max(gradient.numel(), 1)
        if local.shape == gradient.shape:
            whole += (evidence.topology.tp - 1) * square
        elif copies > 1:
            shared += (copies - 1) * square
    return whole, shared


def is_near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two tensors of one shape differ by at most `tolerance` times the norm of the second."""
    return a.shape == b.shape and float((a.double() - b.double()).norm()) <= tolerance * float(b.double().norm())
