"""RMS norms over a width that is split over tp: the mean of squares is that of all ranks.

Owns: the hook that puts the model's own norm right. Does not own: which norms those are (`plan.families.explicit`).

The model's own forward normalises by its local mean m_i; y_i sqrt(m_i + eps) / sqrt(m + eps) is what the whole norm
gives, with the mean m over the whole width. Whatever else the norm does (its weight, its casts) is done as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshlora.comm.collectives import reduce_each_to_each
from meshlora.comm.groups import Axis
from meshlora.common.errors import UnsupportedError
from meshlora.plan.layout import Layout


def widen_norm(module: nn.Module, layout: Layout, tp: Axis, *, name: str) -> None:
    """Make an RMS norm of the local width normalise by the whole one. One sum of `[T, 1]` a direction.

    Raises:
        UnsupportedError: it is not an RMS norm whose epsilon is known.
    """
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float):
        raise UnsupportedError(f"{name}: {type(module).__name__}", "only RMS norms can be split over their width")
    (copies,) = layout.copies(tp.size)  # a width of key/value heads that several ranks hold counts once

    def hook(_: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        x = args[0].to(torch.float32)
        squares = x.square().sum(-1, keepdim=True)
        mean = reduce_each_to_each(squares, tp) / (layout.size * copies)
        factor = torch.sqrt((squares / x.shape[-1] + eps) / (mean + eps))
        return y * factor.to(y.dtype)

    module.register_forward_hook(hook)
