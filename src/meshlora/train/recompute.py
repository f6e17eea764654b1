"""Activation recomputation: decoder layers whose activations are computed once more in the backward, not kept.

Owns: which layers, and how their second forward runs. Does not own: the mechanism, which is that of transformers and
`torch.utils.checkpoint`: the forward of a decoder layer, inside the borders where sp cuts and joins the tokens.

The collectives of such a layer run once more in its backward, in the order of its forward. Every rank runs all of
them: with torch's `early_stop` a rank leaves the second forward as soon as it has what *it* needs, which for experts
could be earlier than its neighbours. No random state is kept, as nothing in a training forward is random.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from meshlora.common.compat import checkpoint_with
from meshlora.common.errors import UnsupportedError
from meshlora.common.float64 import is_lifted, lift
from meshlora.plan.derive import decoder_layers


def recompute_layers(model: PreTrainedModel, recompute: str | int) -> None:
    """Let `model` compute the layers that `recompute` means twice in training, in evaluations once.

    recompute: "none", "full", or n: layers 0, n, 2n, ...

    Raises:
        UnsupportedError: as of `check_recompute`.
    """
    check_recompute(model, recompute)
    every = _every(recompute)
    if not every:
        return
    for number, layer in enumerate(decoder_layers(model)[1]):
        layer.gradient_checkpointing = number % every == 0  # type: ignore[assignment]
        checkpoint_with(layer, _checkpointed)


def check_recompute(model: PreTrainedModel, recompute: str | int) -> None:
    """Refuse recomputation for a model whose layers do not know it. `model` may be on the meta device.

    Raises:
        UnsupportedError: names the kind of layer, or how many layers there are.
    """
    every = _every(recompute)
    if not every:
        return
    _, layers = decoder_layers(model)
    for layer in layers:
        if not isinstance(layer, GradientCheckpointingLayer):
            raise UnsupportedError(
                f"train.recompute={recompute} with model_type {model.config.model_type!r}",
                f"its {type(layer).__name__} cannot be computed twice (no GradientCheckpointingLayer of transformers)",
                "use train.recompute: none",
            )
    if every > len(layers):
        raise UnsupportedError(
            f"train.recompute={recompute}",
            f"the model has {len(layers)} layers, so that only the first would be computed twice",
            f"use at most {len(layers)}, full or none",
        )


def _every(recompute: str | int) -> int:
    """Every how many layers, 0 for none."""
    return recompute if isinstance(recompute, int) else {"none": 0, "full": 1}[recompute]


def _checkpointed(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, whose activations are freed and computed once more when the backward needs them."""
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        early_stop=False,
        context_fn=functools.partial(_contexts, is_lifted()),
    )


def _contexts(was_lifted: bool) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first forward and the second, which runs outside of the block that lifted the first."""
    return contextlib.nullcontext(), lift(was_lifted)
