"""Private names of transformers: attention functions and masks, called in another order than a model does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def set_attention(config: Any, name: str) -> None:
    """Set the attention of `config` alone. Publicly all parts of a model get it, by a name that transformers knows."""
    config._attn_implementation_internal = name


def attention_function(name: str, module: nn.Module) -> Callable[..., Any]:
    """transformers' attention function `name` for an attention module. "eager" is in each model's file, no registry."""
    if name != "eager":
        from transformers import AttentionInterface

        found: Callable[..., Any] = AttentionInterface()[name]
        return found
    code = inspect.unwrap(type(module).forward).__globals__
    own: Callable[..., Any] = code["eager_attention_forward"]
    return own


def rule_of_one_sequence(mask_function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The mask function of one sequence by itself, inside transformers' function for packed rows. None: the function is
    not one for packed rows, or depends on more than positions.

    From 5.23 on transformers gives it positions in the sequence; before, places in the row. There it is that of one
    sequence only if it compares distances: causal, or a window.
    """

    def captured(function: Callable[..., Any]) -> dict[str, Any]:
        cells = getattr(function, "__closure__", None) or ()
        return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))

    def maker(function: Any) -> str:  # the function that made it, or its own name
        return str(getattr(function, "__qualname__", "")).partition(".")[0]

    def is_of_positions(value: Any) -> bool:  # made of plain numbers alone
        if isinstance(value, (tuple, list)):
            return all(map(is_of_positions, value))
        if inspect.isfunction(value):
            return all(map(is_of_positions, captured(value).values()))
        return value is None or isinstance(value, (int, float))

    def is_of_distances(function: Callable[..., Any]) -> bool:
        if maker(function) == "and_masks":
            return all(map(is_of_distances, captured(function)["mask_functions"]))
        return maker(function) in ("causal_mask_function", "sliding_window_overlay")

    found = captured(mask_function).get("mask_functions", ())
    others = [function for function in found if maker(function) != "packed_sequence_mask_function"]
    if len(found) != 2 or len(others) != 1:
        return None
    if maker(others[0]) == "remap_positions_for_packed_sequence":
        alone: Callable[..., Any] = captured(others[0])["mask_function"]
        return alone if is_of_positions(alone) else None
    return others[0] if is_of_distances(others[0]) else None


def views_as_its_input(decoder: nn.Module) -> bool:
    """Whether the forward of `decoder` ends in a view of what its layers return in the shape of its own input."""
    return "output_shape" in inspect.unwrap(type(decoder).forward).__code__.co_varnames


class Unviewed(Tensor):
    """A tensor that stays as it is in a view. All else that is computed of it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # typed as no subclass has it

    def view(self, *_: Any) -> Tensor:
        """The same values in the same shape."""
        return self.as_subclass(Tensor)
