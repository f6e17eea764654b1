"""One input of several linears (q, k, v; gate, up): its gradient is accumulated in one tensor, in place.

Owns: `share`, which gives linears that are called with the same tensor a common node in the graph, and the tensor in
which they accumulate its gradient. Does not own: these linears (`layers.linear`).

Without it each linear allocates its own gradient `[T, in]` and autograd adds them: a write, two reads and a write more
for each further linear.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from meshlora.common.compat import running_backward
from meshlora.layers.notes import note, noted


class InputGradient:
    """The gradient of one input, as accumulated so far by linears in the running backward."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._backward = -1

    def hold(self, total: Tensor) -> None:
        """Keep the sum `total` `[T, in]`: that of `so_far`, updated in place, or the first term."""
        self._sum = total

    def so_far(self) -> Tensor | None:
        """The sum of the running backward, ignoring one that was aborted before it reached the input. The caller must
        call `hold` next."""
        is_other, self._backward = self._backward != running_backward(), running_backward()
        return None if is_other else self._sum

    def take(self) -> Tensor | None:
        """The sum `[T, in]` of the running backward; cleared by the call."""
        found = self._sum if self._backward == running_backward() else None
        self._sum = None
        return found


class _Share(Function):
    """forward: an empty tensor, as a node of the graph after x; backward: the gradient accumulated for x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: InputGradient) -> Tensor:
        ctx.gradient, ctx.shape = gradient, x.shape
        ctx.set_materialize_grads(False)
        # No view of x: that would keep x alive, and x its notes, for ever.
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor | None) -> tuple[Tensor | None, None]:
        found = ctx.gradient.take()
        return None if found is None else found.view(ctx.shape), None


class SharedInput(NamedTuple):
    """The note on a shared input.

    gradient: where linears accumulate its gradient. token: `[0]`, passed to each linear with the detached input: by it
    the input's gradient waits for all of them.
    """

    gradient: InputGradient
    token: Tensor


def share(x: Tensor) -> SharedInput | None:
    """The note shared by all linears that are called with this very tensor, unchanged.

    None if there is nothing to share: without a graph, or for a leaf, which its own node would keep alive for ever.
    """
    if not torch.is_grad_enabled() or x.grad_fn is None:
        return None
    found = noted(x, SharedInput)
    if found is None:
        gradient = InputGradient()
        found = note(x, SharedInput(gradient, _Share.apply(x, gradient)))
    return found
