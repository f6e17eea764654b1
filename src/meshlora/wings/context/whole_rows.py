"""Mixers without a border under context parallelism: they run on whole rows, on each cp rank, which keeps its tokens.

Owns: gathering what they are called with, and the cut of what they give. That is right for whatever sees other tokens,
in any code, and takes the time of one process for these modules; the others of the layer have their part alone.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from meshlora.layers.held_tokens import ContextCut
from meshlora.wings.context.context import RowsOfMask


class UncutArguments:
    """The arguments of the decoder layer that runs, by name, as they were before they were cut."""

    def __init__(self, layer: nn.Module) -> None:
        self.names, self.found = list(inspect.signature(layer.forward).parameters), dict[str, Any]()
        layer.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.found = dict(zip(self.names, args, strict=False)) | kwargs


def run_on_whole_rows(module: nn.Module, context: ContextCut, uncut: UncutArguments) -> None:
    """Let `module` of a layer run on all tokens of its rows. The gradient of its input is summed over cp ranks, each of
    which has that of its own tokens' outputs."""
    names = list(inspect.signature(module.forward).parameters)

    def whole(name: str, value: Any) -> Any:
        value = uncut.found.get(name, value)
        return value.whole if isinstance(value, RowsOfMask) else value

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        by_name = dict[str, Any]()
        given = dict(zip(names, args, strict=False)) | kwargs
        for name, value in given.items():
            by_name[name] = whole(name, value)
        if context.held is not None:
            hidden = "hidden_states" if "hidden_states" in by_name else next(iter(by_name))
            by_name[hidden] = context.held.gathered(given[hidden])
        return (), by_name

    def end(_: nn.Module, __: Any, output: Any) -> Any:
        if context.held is None:
            return None
        if isinstance(output, Tensor):
            return context.cut(output)
        return (context.cut(output[0]), *output[1:])

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end)
