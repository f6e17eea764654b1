"""Region borders: what happens to activations where they enter and leave a block.

Owns: the hooks on the model's own modules that cut the residual stream over the tokens (sp) and that make the input of
a region whole. Does not own: the output side of a split region, which is its row-parallel linear.

Under sp the residual stream between regions is `[1, B*S/tp, H]`: a contiguous slice of the flattened tokens. Slicing
the flattened tokens needs no transposes, and only B*S must divide by tp. A region sees `[B, S, H]` again, as the
attention of transformers reads batch and sequence from the shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.errors import UnsupportedError, UserError
from meshlora.parallel.collectives import (
    copy_one_to_each,
    gather_each_to_each,
    gather_each_to_one,
    slice_one_to_each,
)
from meshlora.parallel.groups import Axis
from meshlora.plan.rules import ModelPlan, Region


class TokenCut:
    """How the tokens of the running forward are cut over tp: remembers `[B, S]` between cut and join."""

    def __init__(self, tp: Axis) -> None:
        self.tp = tp
        self.batch_size = self.seq_len = 0

    def cut(self, x: Tensor) -> Tensor:
        """`[B, S, H]`, alike on all ranks -> `[1, B*S/tp, H]`."""
        self.batch_size, self.seq_len = x.shape[0], x.shape[1]
        tokens = self.batch_size * self.seq_len
        if tokens % self.tp.size:
            raise UserError(
                f"batch_size * seq_len = {self.batch_size} * {self.seq_len}",
                f"under sp the number of tokens must divide by tp={self.tp.size}",
                "pad the sequences (meshlora.data.collate does, with token_multiple=tp)",
            )
        return slice_one_to_each(x.reshape(tokens, -1), self.tp).unsqueeze(0)

    def whole(self, x: Tensor, *, terms: bool) -> Tensor:
        """`[1, B*S/tp, H]` -> `[B, S, H]`. terms: the gradient on each rank will be one term of a sum."""
        gather = gather_each_to_each if terms else gather_each_to_one
        return gather(x.reshape(-1, x.shape[-1]), self.tp).view(self.batch_size, self.seq_len, -1)


def install_borders(model: nn.Module, plan: ModelPlan, tp: Axis) -> None:
    """Put the borders of `plan` on `model`; with tp=1 there are none."""
    cut = TokenCut(tp)
    for region in plan.regions:
        module = model.get_submodule(region.name)
        _install_region(module, region, cut, sp=plan.topology.sp)
    if plan.topology.sp:
        layers = model.get_submodule(plan.layers)
        assert isinstance(layers, nn.ModuleList)
        _map_input(layers[0], "the first decoder layer", cut.cut)
        _map_output(layers[-1], lambda x: cut.whole(x, terms=False))


def _install_region(module: nn.Module, region: Region, cut: TokenCut, *, sp: bool) -> None:
    if region.is_split and sp:
        _map_input(module, region.name, lambda x: cut.whole(x, terms=True))
    elif region.is_split:
        _map_input(module, region.name, lambda x: copy_one_to_each(x, cut.tp))
    elif sp:
        _map_input(module, region.name, lambda x: cut.whole(x, terms=False))
        _map_output(module, cut.cut)


def _map_input(module: nn.Module, name: str, change: Any) -> None:
    """Apply `change` to the hidden states that `module` is called with."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args and isinstance(args[0], Tensor):
            _refuse_second_input(name, (args[1:], kwargs))
            return (change(args[0]), *args[1:]), kwargs
        if isinstance(kwargs.get("hidden_states"), Tensor):
            _refuse_second_input(name, (args, {k: v for k, v in kwargs.items() if k != "hidden_states"}))
            return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
        raise UnsupportedError(name, "a region is called with hidden_states, first or by name")

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _map_output(module: nn.Module, change: Any) -> None:
    """Apply `change` to the hidden states that `module` returns, alone or first in a tuple."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    module.register_forward_hook(hook)


def _refuse_second_input(name: str, rest: Any) -> None:
    """A second input with a gradient would need its own border; without one its gradient is silently a fraction."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(rest)):
        raise UnsupportedError(name, "only the hidden states of a region may carry a gradient", "use tp=1")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
