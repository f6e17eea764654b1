"""Recurrent mixers under context parallelism: each cp rank goes on from the state in which the one before it ends.

Owns: the states of delta nets, state spaces and short convolutions on their way between ranks, with their gradients.
Does not own: the recurrence, which is the model's own code. That takes a cache when it generates text, with the inputs
of its convolution before the tokens at hand, and the state that they left; `PassedStates` stands there as one.

Ranks hold contiguous parts of each row, all as long, so that each knows what the others send. Inputs of the convolution
are gathered, the last few of each rank. The state goes from rank to rank, as the next one needs it first: the ranks
compute a layer's recurrence one after the other. A part has two tokens or more (`plan.token_order.FEWEST`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from meshlora.comm.collectives import gather_each_to_each
from meshlora.comm.groups import Axis
from meshlora.comm.messages import receive_from_neighbour, send_to_neighbour
from meshlora.layers.held_tokens import ContextCut
from meshlora_ground.caches import cache_argument
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.float64 import wide_dtype


class PassedStates:
    """The states of one call of a mixer, in the form of transformers' cache. shape: of its state on this rank."""

    def __init__(self, axis: Axis, hidden: Tensor, shape: tuple[int, ...]) -> None:
        self.axis, self.hidden, self.shape = axis, hidden, shape
        self.first: Tensor | None = None
        self.last: Tensor | None = None

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """Nothing: it is asked for to decode a single token."""

    def is_recording_past(self, *_: Any) -> bool:
        """Whether states may be rolled back."""
        return False

    def update_conv_state(self, inputs: Tensor, *_: Any, conv_kernel_size: int, **__: Any) -> Tensor:
        """`[B, C, n]` -> with the inputs before them `[B, C, conv_kernel_size - 1 + n]`, 0 before the first token."""
        number, reach = inputs.shape[-1], conv_kernel_size - 1
        own = min(number, reach)
        tails = gather_each_to_each(inputs.narrow(-1, number - own, own).contiguous(), self.axis)
        whole = torch.cat([_before(tails.chunk(self.axis.size), self.axis.rank, reach), inputs], -1)
        if self.first is not None:
            # Now, as the rank before gets through this gather before it has a state. In place: the mixer holds it. Its
            # gradient is sent before that of the gather is summed, which the rank before does after it has come.
            anchor = inputs.new_zeros((), requires_grad=torch.is_grad_enabled())
            self.first.copy_(_Received.apply(anchor, self.axis, self.first))
        return whole

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor:
        """The state that the tokens of the ranks before left, 0 on the first; filled by `update_conv_state`."""
        self.first = self.hidden.new_zeros(self.shape, dtype=wide_dtype(self.hidden.dtype))
        return self.first

    def update_recurrent_state(self, state: Tensor, *_: Any, **__: Any) -> None:
        """Keep the state after this rank's tokens for the next rank."""
        self.last = state

    # transformers before 5.21 asks whether there are states, and reads them as attributes of the layer.

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Whether there are states. A mixer asks it first: from here on there is one, as with `get_recurrent_state`."""
        if self.first is None and len(self.shape) > 1:
            self.get_recurrent_state()
        return True

    @property
    def layers(self) -> Mapping[int, Any]:
        """The states by the number of the layer, whichever it is."""
        own = SimpleNamespace(record_past=True, conv_states=(None,), recurrent_states=(self.first,))
        return defaultdict(lambda: own)

    def sent(self, output: Tensor) -> Tensor:
        """`output` of the mixer, with its state on the way to the next rank."""
        if self.first is None:
            return output
        assert self.last is not None, "the mixer has left no state"
        return _Sent.apply(output, self.last, self.axis)


def _before(tails: Sequence[Tensor], rank: int, reach: int) -> Tensor:
    """`[B, C, reach]`: the inputs before those of `rank`, 0 before the first token.

    tails: `[B, C, n]` of each rank, its last inputs: all that it has where these are fewer than `reach`, which then
    comes from several ranks. Those of `rank` itself keep the gather in the graph of the first rank too.
    """
    number = rank * tails[0].shape[-1]
    before = torch.cat(list(tails[: rank + 1]), -1).narrow(-1, 0, number)
    return F.pad(before, (reach, 0)).narrow(-1, number, reach)


class _Received(Function):
    """The state of the rank before. Its gradient goes there."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, axis: Axis, zeros: Tensor) -> Tensor:
        ctx.axis = axis
        return receive_from_neighbour(zeros.clone(), axis, step=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        send_to_neighbour(grads[0].contiguous(), ctx.axis, step=-1)  # where the state came from
        return None, None, None


class _Sent(Function):
    """A mixer's output as it is; its state goes to the next rank, and the gradient of the state comes from there."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, state: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.shape, ctx.dtype = axis, state.shape, state.dtype
        send_to_neighbour(state.to(wide_dtype(output.dtype)).contiguous(), axis, step=1)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        like = grads[0].new_zeros(ctx.shape, dtype=wide_dtype(grads[0].dtype))
        return grads[0], receive_from_neighbour(like, ctx.axis, step=-1).to(ctx.dtype), None


def pass_states(module: nn.Module, name: str, state: tuple[str, ...], context: ContextCut) -> None:
    """Let `module` go on from the states of the cp ranks before this one. state: attributes with the sizes of its
    state `[B, ...]` on this rank; empty if it is a convolution alone.

    Raises:
        UnsupportedError: its forward takes no cache under a name that is known.
    """
    argument = cache_argument(module.forward)
    running: list[PassedStates] = []

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if context.held is None:
            return None
        if context.held.places is not None or argument not in kwargs:
            rule = "a rank's part of a row must be contiguous in it"
            raise UnsupportedError(f"cp with packed rows in {name}", rule, "leave out packing")
        hidden = args[0] if args else kwargs["hidden_states"]
        shape = (context.held.rows, *(getattr(module, size) for size in state))
        running.append(PassedStates(context.axis, hidden, shape))
        return args, kwargs | {argument: running[-1]}

    def end(_: nn.Module, __: Any, output: Any) -> Any:
        if context.held is None:
            return None
        states = running.pop()  # of the call that ends
        if isinstance(output, tuple):
            return (states.sent(output[0]), *output[1:])
        return states.sent(output)

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end)
