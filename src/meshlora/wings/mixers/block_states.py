"""States of earlier blocks that a model's own loop keeps beside the residual stream (inkling2).

Owns: these states in a split model. The model's loop puts the stream before some layers aside, and gives all that it
has to each layer; under sp and cp that stream is cut inside the layers alone. So here they are kept where layers run,
as each layer has its stream, and the loop keeps none; a stage hands on those it has. Does not own: what mixes them,
which sees each token by itself, the message (`wings.stages.hold`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.comm.groups import SharedByCopies


class BlockStates(SharedByCopies):
    """The states of the running forward.

    kept: number of states -> `[B, S, n, H]`, cut as the stream is. before: layer -> the number of states before it;
    the last is of what mixes them after all layers. is_running: whether a layer is of the running stage. is_in_loop:
    whether the model's loop runs, between layers.
    """

    def __init__(self, layers: nn.ModuleList, mixer: nn.Module) -> None:
        self.kept: dict[int, Tensor] = {}
        self.before = [0]
        self.is_running: Callable[[int], bool] = lambda layer: True
        self.is_in_loop = False
        layer: Any
        for index, layer in enumerate(layers):
            is_boundary = bool(layer.is_block_boundary)
            self._keep(layer, index, is_boundary=is_boundary)
            self.before.append(self.before[index] + is_boundary)
        mixer.register_forward_pre_hook(self._mix)

    def given(self, layer: int) -> Tensor:
        """Those before `layer`, `[B, S, n*H]`, to hand on."""
        return self.kept[self.before[layer]].flatten(-2)

    def take(self, layer: int, given: Tensor) -> None:
        """Keep `given` of another stage for `layer`, the first of this one."""
        number = self.before[layer]
        self.kept[number] = given.unflatten(-1, (number, -1))

    def _keep(self, layer: Any, index: int, *, is_boundary: bool) -> None:
        """Let `layer` read the states that are kept here."""

        def begin(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            self.is_in_loop = False
            if not self.is_running(index):
                return args
            stream, number = args[0], self.before[index]
            if number == 0:
                self.kept[0] = stream.new_zeros(*stream.shape[:-1], 0, stream.shape[-1])
            if is_boundary:
                self.kept[number + 1] = _with(self.kept[number], stream)
            return (stream, self.kept[number], *args[2:])

        def end(*_: Any) -> None:
            self.is_in_loop = True

        if is_boundary:
            layer.is_block_boundary = _Boundary(self)
        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)

    def _mix(self, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What mixes the states after all layers takes those kept here."""
        self.is_in_loop = False
        if self.is_running(len(self.before) - 2):
            return (self.kept[self.before[-1]], *args[1:])
        return (args[1].unsqueeze(0), *args[1:])  # of another stage: the first of what it returns is the stream


class _Boundary:
    """Whether a layer begins a block: so for the layer itself, computed again in a backward, too; not for the loop."""

    def __init__(self, states: BlockStates) -> None:
        self.states = states

    def __bool__(self) -> bool:
        return not self.states.is_in_loop


def _with(states: Tensor, stream: Tensor) -> Tensor:
    """`[B, S, n, H]` and the stream `[B, S, H]` -> `[B, S, n + 1, H]`."""
    return torch.cat([states, stream.unsqueeze(-2)], -2)


def keep_block_states(model: nn.Module) -> None:
    """Keep those of `model`, if its layers have some, where they run: its `block_states`."""
    for module in model.modules():
        layers, mixer = getattr(module, "layers", None), getattr(module, "final_input", None)
        if isinstance(mixer, nn.Module) and isinstance(layers, nn.ModuleList):
            model.block_states = BlockStates(layers, mixer)  # type: ignore[assignment]
