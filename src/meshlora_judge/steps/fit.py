"""A gradient as a sum of those of single micro-batches: which of them a trainer added up, and how often.

Every mistake of summing, averaging, accumulating and sharing over ranks leaves a gradient that is a combination of the
micro-batches' own, `g = sum of c_i G_i`. The coefficients c say which, without a list of hypotheses. What no such
combination is was computed otherwise: other labels, another mask, another scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Fit:
    """Attributes:
    coefficients: c, `[M]`, one for each column. residual: |g - sum of c_i G_i| / |g|.
    spreads: `[M]`, the standard error of each coefficient, if what is left over were noise.
    """

    coefficients: Tensor
    residual: float
    spreads: Tensor


def fitted(observed: Gradients, each: Sequence[Gradients], names: Sequence[str]) -> Fit:
    """The best combination of the micro-batches' gradients `each` for `observed`, over `names` together.

    Every name weighs the same: its elements are divided by the norm of the micro-batches' there.
    """
    rows, right = list[Tensor](), list[Tensor]()
    for name in names:
        columns = torch.stack([gradients[name].flatten().double() for gradients in each], 1)
        weight = 1 / columns.norm().clamp_min(1e-300)
        rows.append(columns * weight)
        right.append(observed[name].flatten().double() * weight)
    matrix, target = torch.cat(rows), torch.cat(right)
    # Micro-batches of few tokens have small gradients: each column at its own size.
    sizes = matrix.norm(dim=0).clamp_min(1e-300)
    matrix = matrix / sizes
    solution = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    gap = target - matrix @ solution
    freedom = max(len(target) - len(sizes), 1)
    inverse = torch.linalg.pinv(matrix.T @ matrix, hermitian=True)
    spreads = (inverse.diagonal().clamp_min(0) * gap.square().sum() / freedom).sqrt()
    return Fit(solution / sizes, float(gap.norm() / target.norm().clamp_min(1e-300)), spreads / sizes)


def combined(each: Sequence[Gradients], coefficients: Sequence[float]) -> dict[str, Tensor]:
    """`sum of c_i G_i` of every name."""
    found: dict[str, Tensor] = {}
    for gradients, factor in zip(each, coefficients, strict=True):
        for name, value in gradients.items():
            found[name] = found[name] + factor * value if name in found else factor * value
    return found
