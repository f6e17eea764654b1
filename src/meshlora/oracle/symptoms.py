"""Symptoms: what the numbers of a tensor that differs show, whatever the cause.

Owns: the error of each rank, the ratio of ours to the reference, whether rows have moved. Does not own: what follows
from them (`oracle.diagnose`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshlora.oracle.judge import TensorResult
from meshlora.oracle.unshard import Piece


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
        candidates = whole.narrow(piece.dim, piece.start, piece.values.shape[piece.dim]) if piece.dim else whole
        ours, theirs = piece.values.flatten(1)[:16].double(), candidates.flatten(1).double()
        distance = torch.cdist(ours, theirs, compute_mode="donot_use_mm_for_euclid_dist").min(1).values
        found += int((distance <= 1e-6 * ours.norm(dim=1)).sum())
        total += len(ours)
    return found > total / 2


def are_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a.double() - b.double()).norm()) <= 1e-4 * float(b.double().norm())
