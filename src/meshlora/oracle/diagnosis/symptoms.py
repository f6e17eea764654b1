"""Symptoms: what the numbers of a tensor that differs show, whatever the cause.

Owns: the error of each rank, the ratio of ours to the reference, whether rows have moved. Does not own: what follows
from them (`oracle.diagnosis.diagnose`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshlora.oracle.judge import Evidence
from meshlora.oracle.results import TensorResult
from meshlora.oracle.unshard import Piece
from meshlora.plan.topology import Topology


def tolerance_of(evidence: Evidence) -> float:
    """How far ours may be from what a rule says and still show it."""
    return 1e-6 if evidence.case.dtype == "float64" else 2e-2


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
    ratio = ratio_of(pieces, whole, tolerance)
    if ratio is None or ratio <= 0:
        return None
    number = ratio if ratio >= 1 else 1 / ratio
    is_simple = 2 <= round(number) <= 16 and abs(number / round(number) - 1) < tolerance
    return None if not is_simple else float(round(number)) if ratio > 1 else 1 / round(number)


def ratio_of(pieces: list[Piece], whole: Tensor, tolerance: float) -> float | None:
    """c where ours = c * reference up to an offset that is the same for all rows; None where there is no such c."""
    if not pieces:
        return None
    ours = torch.cat([centred(p.values).flatten() for p in pieces])
    parts = torch.cat([centred(p.of(whole)).flatten() for p in pieces])
    norm = float(parts.square().sum())
    if not norm or not torch.isfinite(ours).all():
        return None
    ratio = float(ours @ parts) / norm
    return ratio if float((ours - ratio * parts).norm()) <= tolerance * float(ours.norm()) else None


def centred(values: Tensor) -> Tensor:
    """Without the mean over rows: a bias, whatever multiple of it was added, is gone."""
    values = values.double()
    return values - values.mean(0, keepdim=True) if values.ndim > 1 and values.shape[0] > 2 else values


def is_permuted(result: TensorResult) -> bool:
    """Whether most of the rows that the ranks hold are rows of the reference that belong somewhere else.

    Most: where tokens moved, some of the places hold padding now, which the reference leaves out.
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


def assembled(pieces: list[Piece], whole: Tensor) -> Tensor:
    """What the ranks hold, put where it belongs in a tensor of the shape of `whole`."""
    result = torch.zeros(whole.shape, dtype=torch.float64)
    for piece in pieces:
        rows = torch.arange(len(whole)) if piece.rows is None else piece.rows
        if piece.dim is None or piece.index is None:
            result[rows] = piece.values.double()
        else:
            part = result[rows].index_copy(piece.dim, piece.index, piece.values.double())
            result[rows] = part
    return result


def is_scaled_by_column(pieces: list[Piece], whole: Tensor, tolerance: float) -> bool:
    """Whether each column is a multiple of the reference's, with a number of its own, up to an offset."""
    if whole.ndim < 2:
        return False
    ours, theirs = centred(assembled(pieces, whole)), centred(whole)
    factors = (ours * theirs).sum(0) / theirs.square().sum(0).clamp(min=1e-300)
    return float((ours - factors * theirs).norm()) <= tolerance * float(ours.norm())


def is_scaled_by_row(pieces: list[Piece], whole: Tensor, tolerance: float) -> bool:
    """Whether each row of each rank is a multiple of the reference's, with a number of its own."""
    for piece in pieces:
        ours, theirs = piece.values.double().flatten(1), piece.of(whole).double().flatten(1)
        factors = (ours * theirs).sum(1, keepdim=True) / theirs.square().sum(1, keepdim=True).clamp(min=1e-300)
        if float((ours - factors * theirs).norm()) > tolerance * float(ours.norm()):
            return False
    return whole.ndim > 1


def are_columns_moved(ours: Tensor, whole: Tensor) -> bool:
    """Whether each row has the values of the reference's, at other columns."""
    if ours.shape != whole.shape or ours.ndim < 2:
        return False
    a, b = (values.double().sort(-1).values for values in (ours, whole))
    return float((a - b).norm()) <= 1e-6 * float(b.norm())


def is_in_rank_order(result: TensorResult, topology: Topology) -> bool:
    """Whether tp rank i holds the i-th part of the whole, wherever it belongs."""
    whole, tp = result.whole, topology.tp
    return whole is not None and all(
        piece.dim is not None
        and piece.values.shape[piece.dim] * tp == whole.shape[piece.dim]
        and torch.equal(piece.values, whole.tensor_split(tp, piece.dim)[topology.coordinates(piece.rank)["tp"]])
        for piece in result.pieces
    )


def is_held_by_several(result: TensorResult, topology: Topology) -> bool:
    """Whether each part of it lies on several tp ranks."""
    if all(piece.dim is None for piece in result.pieces):
        return True
    whole = result.whole
    return whole is not None and all(
        piece.dim is not None and piece.values.shape[piece.dim] * topology.tp > whole.shape[piece.dim]
        for piece in result.pieces
    )


def squares_of_copies(evidence: Evidence) -> tuple[float, float]:
    """What the gradients' squares sum up to beyond the first copy: of what each tp rank holds whole, of parts."""
    whole = shared = 0.0
    for name, gradient in evidence.reference.gradients.items():
        square, local = float(gradient.double().square().sum()), evidence.ranks[0].gradients.get(name)
        if local is None:  # of an expert that is elsewhere
            continue
        copies = local.numel() * evidence.topology.tp // max(gradient.numel(), 1)
        if local.shape == gradient.shape:
            whole += (evidence.topology.tp - 1) * square
        elif copies > 1:
            shared += (copies - 1) * square
    return whole, shared


def are_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a.double() - b.double()).norm()) <= 1e-4 * float(b.double().norm())
