"""The numbers of tokens in a loop of a user's own, by which dropout masks are the same on every topology.

Owns: which forwards get them: those of a step with gradients (`adapter.attach.Loop.masks`), by the tokens themselves,
as nobody knows the place of a row in a global batch. Does not own: the numbering (`meshlora_ground.masks`), what is
done with it (`layers.tokens`). `meshlora train` knows the places, and says them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.adapter.attach import Runtime, runtime
from meshlora.layers.logits_recipe import LogitsRecipe
from meshlora.layers.tokens import Share
from meshlora_ground.masks import numbers_by_content


def given_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Tensor | None]:
    """(name, value) of the token argument of a model's forward: ids `[B, S]`, or embeddings `[B, S, H]`."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(given := kwargs.get(name), Tensor):
            return name, given
    return "input_ids", args[0] if args else None


def number_tokens(model: Any) -> None:
    """Let the forwards of a step say their tokens; what one says holds in its backward too, where layers may be
    recomputed, whatever other forwards there are between the two.
    """
    state, before = runtime(model), list[Any]()

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, ids = given_tokens(args, kwargs)
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if not isinstance(mask, Tensor) or mask.ndim != 2:  # none, or one of its own for each pair of tokens
            mask = None
        masks, own = state.loop.masks, None
        if masks is not None and name == "input_ids" and ids is not None and torch.is_grad_enabled():
            own = functools.cache(functools.partial(_share, ids, mask, masks))
        before.append((state.dropout.say(own), own))

    def end(_: nn.Module, __: Any, output: Any) -> None:
        earlier, own = before.pop() if before else (None, None)  # none of a forward that another hook has refused
        if not torch.is_grad_enabled():  # between a forward and its backward, as of a reference
            state.dropout.say(earlier)
        elif own is not None:
            know_again = state.pipeline.noted()
            for tensor in _with_gradients(output):
                tensor.register_hook(functools.partial(_begin_backward, state, own, know_again))

    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(end, always_call=True)


def _share(ids: Tensor, mask: Tensor | None, masks: tuple[int, int]) -> Share:
    return Share(None, numbers_by_content(ids, mask), *masks)


def _begin_backward(state: Runtime, share: Callable[[], Share], know_again: Callable[[], None], _: Tensor) -> None:
    """The gradient of a forward's result is there: what is recomputed from now on is of its tokens."""
    know_again()
    state.dropout.say(share)


def _with_gradients(output: Any) -> list[Tensor]:
    """The tensors of a model's output that a backward may begin with."""
    values: Iterable[Any] = [output]
    if isinstance(output, Mapping):
        values = output.values()
    elif isinstance(output, tuple):
        values = output
    found = []
    for value in values:
        tensor = value.hidden if isinstance(value, LogitsRecipe) else value
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            found.append(tensor)
    return found
