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
        self.found.pop(self.names[0], None)  # the residual stream


def run_on_whole_rows(module: nn.Module, context: ContextCut, uncut: UncutArguments) -> None:
    """Let `module` of a layer run on all tokens of its rows. The gradient of its input is summed over cp ranks, each of
    which has that of its own tokens' outputs."""
    names = list(inspect.signature(module.forward).parameters)

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given, hidden = dict(zip(names, args, strict=False)) | kwargs, names[0]
        for name in given.keys() & uncut.found.keys():
            given[name] = uncut.found[name]
        for name, value in given.items():
            if isinstance(value, RowsOfMask):
                given[name] = value.whole
        if context.held is not None:
            given[hidden] = context.held.gathered(given[hidden])
        return (), given

    def end(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return context.cut(output)
        return type(output)([context.cut(output[0]), *output[1:]])  # a list, or a tuple

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end, prepend=True)  # before sp cuts the output over tp
