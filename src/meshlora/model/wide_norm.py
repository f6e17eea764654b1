"""RMS norms over a width that is split over tp.

Owns: the hook on such a norm. Does not own: which norms those are (`wings.tables`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from meshlora.comm.collectives import reduce_each_to_each
from meshlora.comm.groups import Axis
from meshlora.plan.layout import Layout
from meshlora_ground.errors import UnsupportedError


def widen_norm(module: nn.Module, layout: Layout, axis: Axis, *, name: str) -> None:
    """Make an RMS norm of the local width normalise over the whole one. One sum of `[T, 1]` per direction.

    The model's own forward normalises by its local mean m_i; y_i sqrt(m_i + eps) / sqrt(m + eps) is the result of the
    whole norm, with the mean m over the whole width. The rest of the norm (its weight, its casts) is unchanged. A gate,
    the norm's second argument, is applied before it unless the module's `norm_before_gate` says otherwise.

    layout: of the whole width; its groups are normalised apart. axis: the ranks that hold a group.

    Raises:
        UnsupportedError: it is not an RMS norm whose epsilon is known.
    """
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float):
        raise UnsupportedError(f"{name}: {type(module).__name__}", "only RMS norms can be split over their width")
    (copies,) = layout.copies(axis.size * layout.groups)  # key/value heads held by several ranks count once
    width = layout.size // layout.groups * copies  # what the sum below has counted
    gates_first = not getattr(module, "norm_before_gate", False)

    def hook(_: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        x = args[0].to(torch.float32)  # as RMS norms of transformers compute
        if gates_first and len(args) > 1 and args[1] is not None:
            x = x * silu(args[1].to(torch.float32))
        squares = x.square().sum(-1, keepdim=True)
        mean = reduce_each_to_each(squares, axis) / width
        factor = torch.sqrt((squares / x.shape[-1] + eps) / (mean + eps))
        return y * factor.to(y.dtype)  # the forward has normalised by the local mean

    module.register_forward_hook(hook)
