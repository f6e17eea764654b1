"""States of earlier blocks that a model's own loop keeps beside the residual stream (inkling2).

Owns: these states in a split model. The model's loop puts the stream before some layers aside, and gives all that it
has to each layer; under sp and cp that stream is cut inside the layers alone. So here they are kept where layers run,
as each layer has its stream, and the loop keeps none. Does not own: what mixes them, which sees each token by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class BlockStates:
    """The states of the running forward: number of states -> `[B, S, n, H]`, cut as the stream is."""

    def __init__(self, layers: nn.ModuleList, mixer: nn.Module) -> None:
        self.kept: dict[int, Tensor] = {}
        number = 0
        layer: Any
        for layer in layers:
            is_boundary = bool(layer.is_block_boundary)
            self._keep(layer, number, is_boundary=is_boundary)
            number += is_boundary
        mixer.register_forward_pre_hook(lambda _, args: (self.kept[number], *args[1:]))

    def _keep(self, layer: Any, number: int, *, is_boundary: bool) -> None:
        """Let `layer`, before which there are `number` states, read those that are kept here."""

        def begin(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            stream, module.is_block_boundary = args[0], is_boundary
            if number == 0:
                self.kept[0] = stream.new_zeros(*stream.shape[:-1], 0, stream.shape[-1])
            if is_boundary:
                self.kept[number + 1] = _with(self.kept[number], stream)
            return (stream, self.kept[number], *args[2:])

        def end(module: Any, *_: Any) -> None:
            module.is_block_boundary = False  # as the model's loop sees it

        layer.is_block_boundary = False
        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)


def _with(states: Tensor, stream: Tensor) -> Tensor:
    """`[B, S, n, H]` and the stream `[B, S, H]` -> `[B, S, n + 1, H]`."""
    return torch.cat([states, stream.unsqueeze(-2)], -2)


def keep_block_states(model: nn.Module) -> None:
    """Keep those of `model`, if its layers have some, where they run."""
    for module in model.modules():
        layers, mixer = getattr(module, "layers", None), getattr(module, "final_input", None)
        if isinstance(mixer, nn.Module) and isinstance(layers, nn.ModuleList):
            BlockStates(layers, mixer)
