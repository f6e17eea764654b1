"""One input of several linears (q, k, v; gate, up): its gradient is added up in one tensor, in place.

Owns: `share`, which gives neighbours that are called with the same tensor one node of the graph in common, and the
tensor in which they add up what flows back. Does not own: the linears that do so (`layers.linear`).

Without it each linear makes a gradient `[T, in]` of its own and autograd adds them: a write, two reads and a write
more for each neighbour.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from meshlora.common.compat import running_backward
from meshlora.layers.notes import note, noted


class InputGradient:
    """The gradient of one input, as far as linears have added to it in the backward that runs."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._backward = -1

    def hold(self, total: Tensor) -> None:
        """`total` `[T, in]` is what linears have added: what `so_far` gave, changed in place, or the first term."""
        self._sum = total

    def so_far(self) -> Tensor | None:
        """What was added in the backward that runs, and not in one that stopped before it came to the input. Whoever
        asks goes on with `hold`."""
        is_other, self._backward = self._backward != running_backward(), running_backward()
        return None if is_other else self._sum

    def take(self) -> Tensor | None:
        """The sum `[T, in]` of the backward that runs, once."""
        found = self._sum if self._backward == running_backward() else None
        self._sum = None
        return found


class _Share(Function):
    """forward: nothing, but a place in the graph behind x; backward: what linears have added up for x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: InputGradient) -> Tensor:
        ctx.gradient, ctx.shape = gradient, x.shape
        ctx.set_materialize_grads(False)
        # No view of x: that would keep x, and x what is noted on it, for ever.
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor | None) -> tuple[Tensor | None, None]:
        found = ctx.gradient.take()
        return None if found is None else found.view(ctx.shape), None


class SharedInput(NamedTuple):
    """What is noted on an input.

    gradient: where linears add what flows back. token: `[0]`, for them to be called with beside the input itself,
    detached: that they are done is what the input's gradient waits for.
    """

    gradient: InputGradient
    token: Tensor


def share(x: Tensor) -> SharedInput | None:
    """What neighbours have in common that come with the very same tensor, unchanged.

    None where there is nothing to share: without a graph, or of a leaf, which its own node would keep alive for ever.
    """
    if not torch.is_grad_enabled() or x.grad_fn is None:
        return None
    found = noted(x, SharedInput)
    if found is None:
        gradient = InputGradient()
        found = note(x, SharedInput(gradient, _Share.apply(x, gradient)))
    return found
